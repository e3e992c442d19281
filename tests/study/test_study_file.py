"""Studies: which runs a file asks for, and how results identify them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adclr.config.parsing import UserError
from adclr.study import study_file, table, time_to_knn
from adclr.study.results import Results, add_scores
from adclr.study.study_file import read_study
from studied import KNN, SMALL, store_results, study

STUDIES = Path(__file__).parents[2] / "studies"


def test_arms_times_grid_times_seeds(tmp_path: Path) -> None:
    arms = {"a": None, "b": {"settings": {"query_keys": "all"}}, "c": {"recipe": "dino_small"}}
    parsed = read_study(study(tmp_path, arms=arms, grid={"views.num_queries": [7, 3]}, seeds=[5, 6]))
    assert [(cell.label, cell.seed) for cell in parsed.cells[:7]] == [
        ("a, num_queries=7", 5),
        ("a, num_queries=3", 5),
        ("b, num_queries=7", 5),
        ("b, num_queries=3", 5),
        ("c, num_queries=7", 5),
        ("c, num_queries=3", 5),
        ("a, num_queries=7", 6),  # the next seed after all of one: the most telling first
    ]
    assert len(parsed.cells) == 12
    assert parsed.labels[:2] == ["a, num_queries=3", "a, num_queries=7"]  # in a table by their numbers
    cell = parsed.cells[3]
    assert (cell.settings.views.num_queries, cell.settings.model.query_keys, cell.settings.train.seed) == (3, "all", 5)
    assert parsed.cells[4].settings.method.num_prototypes == 4096  # that recipe's


def test_a_run_is_known_by_what_it_computes(tmp_path: Path) -> None:
    def key(**changes: Any) -> str:
        return read_study(study(tmp_path, **changes)).cells[0].key

    default = key()
    assert key(title="Another", evaluations={"other": KNN | {"score": "x"}}) == default  # whatever study asks for it
    assert key(arms={"a name": None}) == default
    for setting, value in {"train.device": "cpu", "data.num_workers": 3, "train.keep_checkpoints": 9}.items():
        assert key(settings={setting: value}) == default, setting
    others = [
        key(settings={"method.query_weight": 0.25}),
        key(seeds=[1]),
        key(data="others/train"),
        key(recipe="adclr_small"),
        key(arms={"untrained": {"untrained": True}}),
    ]
    assert len({default, *others}) == 6


def test_a_default_that_has_changed_since_is_noticed(tmp_path: Path) -> None:
    (cell,) = read_study(study(tmp_path)).cells
    results = Results(tmp_path / "results")
    file = results.file(cell)
    file.parent.mkdir(parents=True)
    identity = cell.identity
    file.write_text(json.dumps({**identity, "training": {}, "evaluations": {}}))
    assert results.read(cell) is not None
    identity["settings"] |= {"optim.clip_norm": 7.0, "no.longer.there": 1}
    file.write_text(json.dumps({**identity, "training": {}, "evaluations": {}}))
    with pytest.raises(UserError, match=r"optim\.clip_norm=7\.0, which is 3\.0 now; delete it or set"):
        results.read(cell)


DAMAGED: dict[str, Any] = {
    "cut short": '{"settings": {',
    "not text": b"\xff\xfe\x00",
    "a list": "[]",
    "settings": {"settings": []},
    "training": {"training": None},
    "its last numbers": {"training": {"last": []}},
    "evaluations": {"evaluations": []},
    "an evaluation": {"evaluations": {"x": []}},
    "scores": {"evaluations": {"x": {"scores": [1]}}},
    "provenance": {"provenance": ["a"]},
}


@pytest.mark.parametrize("damage", list(DAMAGED))
def test_a_damaged_result_is_named(tmp_path: Path, damage: str) -> None:
    parsed, results = store_results(tmp_path / "results", study(tmp_path), {("demo", 0): 50.0})
    file, change = results.file(parsed.cells[0]), DAMAGED[damage]
    assert results.read(parsed.cells[0]) is not None
    if isinstance(change, dict):
        change = json.dumps(json.loads(file.read_text()) | change)
    file.write_bytes(change if isinstance(change, bytes) else change.encode())
    with pytest.raises(UserError, match=rf"{file.name} is not the result of a run; delete it"):
        results.read(parsed.cells[0])


def test_scores_made_with_another_default_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    parsed, results = store_results(tmp_path / "results", study(tmp_path), {("demo", 0): 50.0})
    (cell,), (one,) = parsed.cells, parsed.outline.evaluations.values()
    add_scores(results.file(cell), one, {"knn_top1_k3": 51.0}, 1.0)
    assert results.is_complete(parsed, cell)
    written = json.loads(results.file(cell).read_text())
    written["evaluations"][one.key]["built"] |= {"gone": 1, "temperature": 0.09}
    results.file(cell).write_text(json.dumps(written))
    with pytest.raises(UserError, match=r"scores of knn made with temperature=0\.09, which is 0\.07 now"):
        results.is_complete(parsed, cell)


def test_a_number_that_is_none_is_not_shown(tmp_path: Path) -> None:
    """A loss that was NaN at the end, which JSON of Python keeps."""
    scores = {("demo", seed): float("nan") if seed else 50.0 for seed in (0, 1)}
    parsed, results = store_results(tmp_path / "results", study(tmp_path, seeds=[0, 1]), scores)
    assert "| demo | 50.0 |" in table.render_page(parsed, results, table.collect_rows(parsed, results), None)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"seed": 3}, "'seed' is not known here"),
    "no evaluation": ({"evaluations": {}}, "evaluations"),
    "unknown evaluation": ({"evaluations": {"x": KNN | {"name": "kn"}}}, "unknown evaluation 'kn'"),
    "its setting": ({"evaluations": {"x": KNN | {"settings": {"kk": 3}}}}, "evaluation 'x': unknown setting 'kk'"),
    "its data": ({"evaluations": {"x": {"name": "knn", "score": "y"}}}, "evaluation knn needs data: NAME"),
    "its weights": (
        {"evaluations": {"x": KNN | {"settings": {"weights": "W"}}}},
        "takes weights and data from the study",
    ),
    "a setting": ({"settings": {"epoch": 3}}, "did you mean 'train.epochs'"),
    "a value": ({"settings": {"epochs": "many"}}, "train.epochs='many'"),
    "a combination": ({"settings": {"global_size": 33}}, "not divisible"),
    "the seed": ({"settings": {"seed": 1}}, "train.seed is not a setting here"),
    "the data": ({"grid": {"data.path": ["x"]}}, "data.path is not a setting here"),
    "the recipe": ({"recipe": "adclr_smal"}, "did you mean 'adclr_small'"),
    "the control": ({"control": "nobody"}, "control 'nobody' is none of: demo"),
    "an empty grid": ({"grid": {"epochs": []}}, "grid epochs has no values"),
    "the same twice": ({"arms": {"a": None, "b": None}}, "'a' and 'b' are the same run"),
    "a path": ({"data": "../photos"}, "is not a name"),
    "a path in the middle": ({"data": "photos/../../etc"}, "is not a name"),
    "an absolute path": ({"data": "/etc"}, "is not a name"),
    "a negative seed": ({"seeds": [-1]}, "seeds"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_mistakes_are_found_before_a_run_begins(tmp_path: Path, mistake: str) -> None:
    changes, message = MISTAKES[mistake]
    with pytest.raises(UserError) as caught:
        read_study(study(tmp_path, **changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "one.yaml" in str(caught.value)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for name in ("title", "data", "recipe", "evaluations"):
        (tmp_path / "x.yaml").write_text(json.dumps({key: value for key, value in SMALL.items() if key != name}))
        with pytest.raises(UserError, match=rf"x\.yaml: '{name}' is missing; add it$"):
            read_study(tmp_path / "x.yaml")


def test_data_is_a_name_a_kind_and_a_folder_in_it() -> None:
    folders = {"cars": Path("/data/cars"), "im": Path("/data/im")}
    assert study_file.data_path("cars:cars", folders) == "cars:/data/cars"
    assert study_file.data_path("im/train/a", folders) == "/data/im/train/a"
    assert study_file.data_name("cars:im/train") == "im"


@pytest.mark.parametrize(
    "text", ["", "- a\n", "title: [", "!!python/object/apply:os.system ['touch x']", "a: &a [*a]\n"]
)
def test_what_is_no_study_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError, match=r"study .*x\.yaml"):
        read_study(tmp_path / "x.yaml")


@pytest.mark.parametrize("file", sorted(STUDIES.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_study_that_is_shipped_can_be_run(file: Path) -> None:
    parsed = read_study(file)
    assert parsed.cells
    assert len({cell.key for cell in parsed.cells}) == len(parsed.cells)
    scores = {"knn": {"knn_top1_k20"}, "linear": {"linear_top1"}, "finetune": {"finetune_top1"}}
    scores |= {"incontext": {"incontext_miou"}, "segmentation": {f"segmentation_{s}" for s in ("miou", "aacc", "macc")}}
    scores |= {time_to_knn.NAME: set(time_to_knn.SCORES)}
    scores |= {
        "detection": {f"{kind}_{score}" for kind in ("box", "mask") for score in ("ap", "ap50", "ap75")},
        "matching": {"patch_matching"},
        "training": {"rank_cls", "rank_patches", "queries_in_cls", "query_image_gap"},
    }
    for evaluation in parsed.outline.evaluations.values():  # names that the tests of these evaluations have seen
        assert evaluation.score in scores[evaluation.name]


def test_collapse_is_looked_for_where_it_can_be() -> None:
    """A local view has no queries: with any, `[CLS]` must match a view whose queries it cannot read."""
    cells = read_study(STUDIES / "collapse.yaml").cells
    assert {(cell.settings.views.num_queries, cell.settings.model.query_keys) for cell in cells} == {
        (number, keys) for number in (1, 10, 49) for keys in ("image", "all")
    }
    for cell in cells:
        assert cell.settings.views.num_local == 0 or cell.settings.method.queries_in_local_views
        patches = (cell.settings.views.global_size // cell.settings.model.patch_size) ** 2
        assert max(each.settings.views.num_queries for each in cells) >= patches


def test_ablations_share_their_runs() -> None:
    """A run that several of them ask for is made once."""
    for names in (("query_weight", "num_queries", "query_scale", "collapse"), ("query_keys", "details")):
        assert set.intersection(*({cell.key for cell in read_study(STUDIES / f"{name}.yaml").cells} for name in names))
