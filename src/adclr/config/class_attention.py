"""Which settings go together with class attention and with the patch loss. Imports no torch."""

from __future__ import annotations


def refuse_class_attention(blocks: int, other_tokens: int, neighbor_weight: float, masked: bool, target: str) -> None:
    """Raise a ValueError for combinations that no method defines; `other_tokens` are queries and registers."""
    refusals = (
        (
            blocks and other_tokens,
            "model.class_attention is for patches alone; set views.num_queries=0 and model.num_registers=0",
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
