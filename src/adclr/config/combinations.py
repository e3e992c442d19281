"""Which settings go together: of queries, class attention, the patch loss, epochs and batch sizes. Imports no torch."""

from __future__ import annotations


def refuse_queries(
    local_source_without_local: bool, start_without_end: bool, leaking: bool, copies_without_blocks: bool
) -> None:
    """Raise a ValueError for settings of queries that contradict each other."""
    refusals = (
        (
            local_source_without_local,
            "views.query_source=local takes queries from local crops, and views.num_local=0; "
            "set views.num_local=6, or views.query_source=random",
        ),
        (
            start_without_end,
            "method.query_temperature_start needs an end; set method.query_temperature too, or leave it out",
        ),
        (
            leaking,
            "model.query_keys=all lets queries leak masked pixels; "
            "set method.masked_weight=0 or another model.query_keys",
        ),
        (
            copies_without_blocks,
            "method.read_only_copies needs blocks in which queries are read-only; set model.query_read_only_blocks=4",
        ),
    )
    for refused, sentence in refusals:
        if refused:
            raise ValueError(sentence)


def refuse_class_attention(
    blocks: int, other_tokens: int, rotary: bool, neighbor_weight: float, masked: bool, target: str
) -> None:
    """Raise a ValueError for combinations that no method defines; `other_tokens` are queries and registers."""
    refusals = (
        (
            blocks and other_tokens,
            "model.class_attention is for patches alone; set views.num_queries=0 and model.num_registers=0",
        ),
        (
            blocks and rotary,
            "model.class_attention is for patches with learned positions; set model.position_embedding=learned",
        ),
        (
            neighbor_weight and not blocks,
            "method.neighbor_weight needs blocks in which a token reads given patches; set model.class_attention=2",
        ),
        (
            neighbor_weight and masked,
            "method.neighbor_weight predicts what is around patches that are seen; set method.masked_weight=0",
        ),
        (
            neighbor_weight and target == "sinkhorn",
            "method.neighbor_weight has centered targets; set method.target=center",
        ),
    )
    for refused, sentence in refusals:
        if refused:
            raise ValueError(sentence)


def refuse_epochs(epochs: int, warmup: float, frozen: float, given_weights: bool) -> None:
    """Raise a ValueError where warmup or the frozen backbone leave no epoch; `frozen` needs given weights."""
    if warmup >= epochs:
        raise ValueError(
            f"optim.warmup_epochs={warmup:g} leaves none of the {epochs} epochs; "
            f"set optim.warmup_epochs={epochs / 10:g} or more train.epochs"
        )
    if frozen and not given_weights:
        raise ValueError(
            "optim.freeze_backbone_epochs would freeze random numbers; set model.init too, or leave it out"
        )
    if frozen >= epochs:
        raise ValueError(
            f"optim.freeze_backbone_epochs={frozen:g} leaves none of the {epochs} epochs; "
            f"set optim.freeze_backbone_epochs={epochs / 10:g} or more train.epochs"
        )


def refuse_micro_batch(batch_size: int, micro_batch_size: int | None) -> None:
    """Raise a ValueError where a batch is not a number of whole micro-batches."""
    if micro_batch_size and batch_size % micro_batch_size:
        fits = max(m for m in range(1, micro_batch_size + 1) if batch_size % m == 0)
        raise ValueError(
            f"train.micro_batch_size={micro_batch_size} does not divide train.batch_size={batch_size}; "
            f"set train.micro_batch_size={fits}"
        )
