from __future__ import annotations

import pytest

from adclr.config import parsing
from adclr.config.parsing import UserError, build, parse_words
from adclr.config.settings import Settings, Train


def test_layers_win_in_order_and_names_may_be_short_or_nested() -> None:
    settings = build(Settings, {"train": {"epochs": 50}}, {"train.batch_size": 64}, {"epochs": 70, "num_queries": 3})
    assert (settings.train.epochs, settings.train.batch_size, settings.views.num_queries) == (70, 64, 3)


def test_words_are_yaml() -> None:
    values = parse_words(["lr=1e-3", "views.global_scale=[0.3, 1]", "clip_norm=null", "labels=true", "probe.data=a=b"])
    settings = build(Settings, values)
    words = parse_words(["a=off", "b=no", "c=1:30", "d=2026-11-15", "e=0x10", "f=~", "g=", "h=-3", "i=.inf", "j=True"])
    assert list(words.values()) == ["off", "no", "1:30", "2026-11-15", "0x10", None, None, -3, float("inf"), True]
    assert settings.optim.lr == 1e-3
    assert settings.views.global_scale == (0.3, 1.0)
    assert settings.optim.clip_norm is None
    assert settings.data.labels is True
    assert settings.probe.data == "a=b"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.epoch=5"], "unknown setting 'train.epoch'; did you mean 'train.epochs'?"),
        (["epoch=5"], "did you mean 'train.epochs'?"),
        (["qeury_weight=1"], "did you mean 'method.query_weight'?"),
        (["zzzzzz=1"], "--help-all lists all settings"),
        (["frobnication=1"], "--help-all lists all settings"),
        (["scheduler=cosine"], "unknown setting 'scheduler'; --help-all lists all settings"),
        (["lerning_rate=1"], "unknown setting 'lerning_rate'; did you mean 'optim.lr'?"),
        (["learning_rate=1"], "did you mean 'optim.lr'?"),
        (["optim.learning_rate=1"], "did you mean 'optim.lr'?"),
        (["batch=8"], "did you mean 'train.batch_size'?"),
        (["wd=8"], "did you mean 'optim.weight_decay'?"),
        (["workers=8"], "did you mean 'data.num_workers'?"),
        (["optim.epochs=8"], "did you mean 'train.epochs'?"),
        (["num_epochs=8"], "did you mean 'train.epochs'?"),
        (["views.num_locals=8"], "did you mean 'views.num_local'?"),
        (["epochs=many"], "train.epochs='many'"),
        (["epochs=0"], "train.epochs=0"),
        (["momentum=1.5"], "method.momentum=1.5"),
        (["lr=.nan"], "optim.lr=nan"),
        (["model.size=huge"], "model.size='huge'"),
        (
            ["global_size=100"],
            "views.global_size=100 is not divisible by model.patch_size=16; set views.global_size=96",
        ),
        (["local_size=50"], "set views.local_size=48"),
        (["num_heads=5"], "model.num_heads=5 does not divide the width 384; set model.num_heads=4"),
        (["dim=16", "num_heads=32"], "set model.num_heads=16"),
        (["query_keys=all", "masked_weight=1"], "leak masked pixels"),
        (["query_source=local", "num_local=0"], "views.num_local=0; set views.num_local=6"),
        (["query_temperature_start=0.1"], "set method.query_temperature too"),
        (["read_only_copies=true"], "set model.query_read_only_blocks=4"),
        (["query_read_only_blocks=13"], "is more than the 12 blocks of this model"),
        (["query_read_only_blocks=1", "query_keys=all"], "set model.query_keys=patches"),
        (["epochs=5"], "optim.warmup_epochs=10 leaves none of the 5 epochs; set optim.warmup_epochs=0.5"),
        (["batch_size=100", "micro_batch_size=64"], "set train.micro_batch_size=50"),
        (["global_scale=[0.9, 0.4]"], "views.global_scale must go from low to high"),
        (["loggers=[tensorbord]"], "train.loggers"),
        (["mean=[0.5, 0.5]"], "data.mean"),
        (["train=5"], "'train' is a group of settings; set one of its own, such as train.epochs"),
    ],
)
def test_mistakes_are_one_sentence_that_names_the_thing(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        build(Settings, parse_words(words))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "word", ["epochs", "=5", "epochs=[1", "epochs={a: b", "epochs=!!python/object/apply:os.system [x]"]
)
def test_words_that_are_no_settings(word: str) -> None:
    with pytest.raises(UserError):
        build(Settings, parse_words([word]))


def test_yaml_is_data() -> None:
    for text in ("!!python/object/apply:os.system ['true']", "!!python/name:os.system", "&a [*a", "[" * 5000):
        with pytest.raises(UserError):
            parsing.load_yaml(text, "recipe x")


def test_recipes_are_found_and_mistyped_ones_corrected() -> None:
    with pytest.raises(UserError, match="did you mean 'adclr_vits16'"):
        parsing.load_recipe("adclr_vits_16")
    with pytest.raises(UserError, match="--list-recipes"):
        parsing.load_recipe("%%%")
    with pytest.raises(UserError, match="cannot be read"):
        parsing.load_recipe("nowhere.yaml")


def test_every_setting_is_explained_and_has_a_default() -> None:
    for path, default, meaning in parsing.describe(Settings):
        assert meaning, path
        assert default or path in ("data.path", "recipe")
    names = [path.rsplit(".", 1)[-1] for path, _ in parsing.leaves(Settings)]
    assert len(set(names)) == len(names)  # so that the short name of every setting is enough


def test_a_short_name_that_could_be_two_settings_is_refused() -> None:
    class Two(parsing.Section):
        train: Train = Train()
        other: Train = Train()

    with pytest.raises(UserError, match=r"'epochs' could be train\.epochs or other\.epochs"):
        build(Two, {"epochs": 5})


def test_settings_go_through_yaml_unchanged() -> None:
    import yaml

    settings = build(Settings, {"loggers": ["wandb"], "clip_norm": None, "epochs": 33})
    again = build(Settings, yaml.safe_load(yaml.safe_dump(settings.model_dump(mode="json"))))
    assert again == settings
    other = build(Settings, {"loggers": ["wandb"], "clip_norm": 1.0, "epochs": 33})
    assert parsing.differences(settings, other) == ["optim.clip_norm is None there and 1.0 here"]
    assert parsing.differences(settings, other, ["optim.clip_norm"]) == []


def test_fields_say_where_a_setting_may_differ() -> None:
    from adclr.evals import detection, finetune, segmentation

    every = {"weights", "data", "num_workers", "device", "max_unreadable", "checkpoint_minutes"}
    tested = {"pictures", "test_batch_size"}
    more = {"compile", "inference", "test_scales", "test_mirrored", "val_split"}
    assert parsing.free_settings(detection.Settings, "resume") == every | tested
    assert parsing.free_settings(segmentation.Settings, "resume") == every | tested | more
    assert parsing.free_settings(finetune.Settings, "resume") == every | {
        *("micro_batch_size", "compile", "validate_every")
    }
    assert parsing.free_settings(detection.Settings, "control") == {"from_scratch", "partial", "device", "num_workers"}
    study = parsing.free_settings(finetune.Settings, "study")
    assert study == every | {"partial", "from_scratch", "precision", "compile", "micro_batch_size"}
    pretraining = parsing.free_settings(Settings, "resume")
    assert {"recipe", "data.path", "train.compile", "train.device", "probe.data"} < pretraining
    assert not {"train.epochs", "train.precision", "train.seed", "optim.lr", "data.mean"} & pretraining
