"""The pictures as a user gets them: of any image, with their numbers, and no picture where there is none to draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from adclr.config.parsing import UserError, build
from adclr.features import analysis, drawing, figures, visualize
from adclr.features.drawing import ColorBar, Tile
from adclr.features.visualize import FIGURES
from adclr.training import launch, loop
from tiny import TINY, Adclr


@pytest.fixture(scope="module")
def run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    loop.train(launch.prepare(images / "train", folder, None, TINY | {"train.epochs": 1}))
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Of every shape, one gray, one broken, in two classes."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "photos"
    for name, shape in (
        ("cat/a.png", (30, 60, 3)),
        ("cat/b.jpg", (50, 20, 3)),
        ("dog/c ü.png", (16, 16)),
        ("dog/d.png", (9, 90, 3)),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(folder / name)
    (folder / "cat/broken.png").write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    return folder


def draw(name: str, run: Path, images: Path | list[Path], out: Path, **settings: object) -> dict[str, object]:
    words = [str(path) for path in (images if isinstance(images, list) else [images])]
    return visualize.write_figures(name, str(run), words, out, build(FIGURES[name][0], {"device": "cpu"} | settings))


@pytest.mark.parametrize("name", list(FIGURES))
def test_every_picture_of_images_of_any_shape(
    name: str, run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    report = draw(name, run, photos, out)
    assert "skipped cat/broken.png" in capsys.readouterr().err
    singles = sorted(path.name for path in out.glob(f"0*.{name}.png"))
    assert len(singles) == (3 if name == "match" else 4)
    assert all(file.isascii() for file in singles)
    for path in out.glob("*.png"):
        with Image.open(path) as picture:
            assert picture.width > 200
            assert len(np.unique(np.asarray(picture).reshape(-1, 3), axis=0)) > 300  # not blank
    written = json.loads((out / f"{name}.json").read_text())
    assert written["images"] == json.loads(json.dumps(report["images"]))
    assert written["weights"] == str(run)
    assert written["provenance"]["adclr"]
    assert (out / "queries_across.png").exists() == (name == "queries")


def test_the_command_draws_and_says_where(adclr: Adclr, run: Path, photos: Path, tmp_path: Path) -> None:
    done = adclr("visualize", "attention", run, photos / "cat/a.png", "--out", tmp_path / "o", "size=32", "device=cpu")
    assert done.returncode == 0, done.stderr
    assert "attention.png" in done.stdout
    assert (tmp_path / "o/0000_a.attention.png").exists()
    text = adclr("visualize", "queries", "--help").stdout
    assert "across" in text
    assert "mass" not in text


def test_numbers_say_what_the_pictures_show(run: Path, photos: Path, tmp_path: Path) -> None:
    row, *_ = draw("attention", run, photos / "cat/a.png", tmp_path, mass=0.5)["images"]  # type: ignore[misc]
    held = analysis.load_weights(run)
    seen = analysis.prepare_image("a", held.decoder((photos / "cat/a.png").read_bytes()), 32, 4)
    assert seen.pixels.shape == (3, 32, 64)
    maps, _ = analysis.attend(held, seen, analysis.read_memory(held, seen))
    assert row["peak"] == pytest.approx(float(maps[0].max()), rel=1e-4)
    assert row["share_of_patches"] == pytest.approx(analysis.top_mass(maps[0, 0], 0.5).mean())
    (first,) = draw("match", run, [photos / "cat/a.png"] * 2, tmp_path)["images"]  # type: ignore[misc]
    assert first["share_of_patches"] == 1
    assert first["cosine_median"] == pytest.approx(1, abs=1e-5)
    assert first["shift_median"] == [0, 0]


@pytest.fixture(scope="module")
def coarse(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of patches of 16 pixels and 8 heads."""
    folder = tmp_path_factory.mktemp("run") / "coarse"
    sizes = {"views.global_size": 32, "views.local_size": 16, "model.patch_size": 16, "model.num_heads": 8}
    loop.train(launch.prepare(images / "train", folder, None, TINY | sizes | {"train.epochs": 1}))
    return folder


@pytest.mark.parametrize(("name", "columns"), [("attention", 3), ("queries", 4), ("pca", 2), ("match", 4)])
def test_at_448_pixels_nothing_is_drawn_smaller_than_it_was_seen(
    name: str, columns: int, coarse: Path, photos: Path, tmp_path: Path
) -> None:
    draw(name, coarse, [photos / "cat/a.png"] * 2, tmp_path, size=448)  # twice as wide as high
    with Image.open(tmp_path / f"0001_a.{name}.png") as picture:
        between = 896 // 12 - drawing.GAP if name == "match" else 0  # of the two images that lines join
        assert picture.width == 2 * drawing.PAD + columns * 896 + (columns - 1) * drawing.GAP + between
        assert picture.height > 448
        assert len(np.unique(np.asarray(picture).reshape(-1, 3), axis=0)) > 1000


def test_what_is_not_on_the_sheet_is_said(
    coarse: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: dict[str, str] = {}
    sheet = drawing.compose_sheet

    def noted(rows: list[list[Tile]], *given: object, **named: object) -> Image.Image:
        actual = sheet(rows, *given, **named)  # type: ignore[arg-type]
        words = [word for word in (*given, *named.values()) if isinstance(word, str)]
        said[f"{len(rows)}x{len(rows[0])}"] = " ".join(words)
        return actual

    monkeypatch.setattr(drawing, "compose_sheet", noted)
    draw("attention", coarse, images / "train", tmp_path, num_images=26)
    assert "24 of 26 images, spread over them, and heads 0 to 5 of 8" in capsys.readouterr().out
    assert "24 of 26 images, spread over them, and heads 0 to 5 of 8" in said["24x9"]
    draw("pca", coarse, images / "train", tmp_path, num_images=26)
    assert "24 of 26 images, spread over them;" in capsys.readouterr().out
    assert "Red, green and blue" in said["6x8"]
    assert "24 of 26 images, spread over them;" in said["6x8"]
    draw("match", coarse, images / "train", tmp_path, num_images=3)
    assert "This sheet" not in capsys.readouterr().out
    assert "the image named beside the row. A line joins" in said["2x3"]
    names = sorted(path.relative_to(images / "train").as_posix() for path in (images / "train").rglob("*.png"))
    assert f"Left {names[0]}, right {names[-1]}." in said["1x3"]


@pytest.mark.parametrize("name", list(FIGURES))
def test_sheets_have_images_from_the_whole_collection(
    name: str, run: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is that of names, which is often that of classes or of time."""
    names = sorted(path.relative_to(images / "train").as_posix() for path in (images / "train").rglob("*.png"))
    shown: list[str] = []
    sheet = drawing.compose_sheet

    def noted(cells: list[list[Tile]], *given: Any, **named: Any) -> Image.Image:
        shown[:] = given[0] if given else [cell.title for row in cells for cell in row if cell.title]
        return sheet(cells, *given, **named)

    monkeypatch.setattr(drawing, "compose_sheet", noted)
    monkeypatch.setattr(figures, "MAX_ON_SHEET", 4)
    draw(name, run, images / "train", tmp_path, num_images=8, **({"across": 0} if name == "queries" else {}))
    assert len(shown) == 4  # of the sheet, which is drawn last
    assert shown[-1] == names[-1]
    gaps = np.diff([names.index(one) for one in shown])
    assert gaps.min() > 5  # of 32
    assert gaps.max() < 16


def test_background_can_be_left_out(run: Path, photos: Path, tmp_path: Path) -> None:
    kept = draw("pca", run, photos, tmp_path / "a")
    removed = draw("pca", run, photos, tmp_path / "b", background="remove")
    assert all(row["share_of_things"] == 1 for row in kept["images"])  # type: ignore[attr-defined]
    assert any(row["share_of_things"] < 1 for row in removed["images"])  # type: ignore[attr-defined]
    assert (tmp_path / "a/pca.png").read_bytes() != (tmp_path / "b/pca.png").read_bytes()


def test_queries_are_drawn_by_name_and_seed_or_given(run: Path, photos: Path, tmp_path: Path) -> None:
    def boxes(images: Path | list[Path], **settings: object) -> list[object]:
        report = draw("queries", run, images, tmp_path, across=0, **settings)
        return [row["boxes"] for row in report["images"]]  # type: ignore[attr-defined]

    whole = boxes(photos)
    assert boxes(photos, num_images=1)[0] == whole[0]  # whatever else is drawn
    assert boxes(photos, seed=1) != whole
    for left, top, right, bottom in (box for own in whole for box in own):  # type: ignore[attr-defined]
        assert 0 <= left < right <= 1
        assert 0 <= top < bottom <= 1
    assert boxes(photos / "cat", box=[0.1, 0.2, 0.5, 0.6])[0] == [(0.1, 0.2, 0.5, 0.6)]


def test_matched_and_mismatched_are_the_classes_of_the_folders() -> None:
    pixels = np.zeros((3, 4, 4), np.uint8)
    cat, tom, dog, stray = (analysis.InputImage("x", pixels, label) for label in ("cat", "cat", "dog", None))
    assert figures.class_relation(cat, cat) == "itself"
    assert figures.class_relation(cat, tom) == "matched"
    assert figures.class_relation(cat, dog) == "mismatched"
    assert figures.class_relation(cat, stray) == ""


def test_mistakes_are_said_before_anything_is_written(run: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    cases: list[tuple[str, list[Path], dict[str, object], str]] = [
        ("attention", [photos], {"block": 2}, "have 2 blocks, and no block 2; write 0 to 1"),
        ("match", [photos / "cat/a.png"], {}, "name the other one too"),
        ("queries", [photos], {"box": [0.5, 0.2, 0.4, 0.6]}, "is empty; write left, top, right, bottom"),
        ("pca", [photos / "cat/broken.png"], {}, "none of the 1 images"),
        ("pca", [photos, photos / "cat/a.png"], {}, "is not an image file; name image files, or one folder"),
        ("pca", [tmp_path / "nowhere"], {}, "does not exist"),
    ]
    for name, images, settings, message in cases:
        with pytest.raises(UserError, match=message):
            draw(name, run, images, out, **settings)
        assert not out.exists()


def test_a_gray_network_and_many_bands_can_be_seen() -> None:
    for channels in (1, 5):
        image = drawing.display_image(np.zeros((channels, 8, 12), np.uint8), 24)
        assert image.size == (24, 16)
        assert image.mode == "RGB"


def test_what_is_flat_looks_flat_and_what_peaks_does_not() -> None:
    image = Image.new("RGB", (64, 64), "gray")
    flat = np.asarray(
        drawing.overlay_attention(image, np.full((8, 8), 1.0, np.float32) + 0.01 * np.eye(8, dtype=np.float32))
    )
    peaked = np.asarray(drawing.overlay_attention(image, np.eye(8, dtype=np.float32) * 8))
    assert np.ptp(flat.astype(int), axis=(0, 1)).max() < 6
    assert np.ptp(peaked.astype(int), axis=(0, 1)).max() > 100


def test_the_colors_rise_in_brightness() -> None:
    """So that they read in gray and for every kind of color-blindness."""
    colors = drawing.viridis(np.linspace(0, 1, 50, dtype=np.float32)).astype(float)
    brightness = colors @ [0.299, 0.587, 0.114]
    assert (np.diff(brightness) > 0).all()


@pytest.mark.filterwarnings("error")
def test_maps_of_a_diverged_network_are_drawn_without_a_warning() -> None:
    image, values = Image.new("RGB", (32, 32), "white"), np.full((4, 4), np.nan, np.float32)
    assert drawing.overlay_attention(image, values).size == image.size
    assert drawing.overlay_colors(image, np.stack([values] * 3, axis=-1)).getpixel((16, 16)) == (0, 0, 0)


def test_a_sheet_has_room_for_its_words() -> None:
    cell = Tile(Image.new("RGB", (160, 90), "red"), "a title that is far too long to fit above its cell", "and a note")
    made = drawing.compose_sheet(
        [[cell, cell], [cell]], ["one", "two/" + "x" * 400], ColorBar("0", "1", "what it means " * 40)
    )
    assert made.width < 160 * 2 + 220 + 60
    assert made.height > 2 * 90
    assert made.getpixel((made.width - 1, made.height - 1)) == (255, 255, 255)


def test_warping_by_the_places_themselves_changes_nothing() -> None:
    rng = np.random.default_rng(1)
    image = Image.fromarray(rng.integers(0, 256, (32, 48, 3), np.uint8))
    same = analysis.patch_centers((8, 12)).reshape(8, 12, 2)
    assert np.array_equal(np.asarray(drawing.warped(image, image, same)), np.asarray(image))
    right = same + np.array([4 / 48, 0], np.float32)  # what is here lies four pixels to the right there
    moved = np.asarray(drawing.warped(image, image, right))
    assert np.abs(moved[:, :-4].astype(int) - np.asarray(image)[:, 4:]).max() <= 1


def test_two_networks_are_shown_one_below_the_other(run: Path, coarse: Path, photos: Path, tmp_path: Path) -> None:
    """[CLS] and queries in matched and mismatched images, as in the paper's first figure."""
    report = draw("queries", run, photos, tmp_path, against=str(coarse), size=32, num_queries=1)
    with Image.open(tmp_path / "queries_against.png") as picture:
        assert picture.height > 10 * figures.CELL / 2  # 2 rows of [CLS], and 2 for each of 4 queries
    against: Any = json.loads((tmp_path / "queries.json").read_text())["against"]
    assert against["images"] == [row["name"] for row in report["images"]]  # type: ignore[attr-defined]
    first, second = against["networks"]
    assert [first["weights"], second["weights"]] == [analysis.short_name(str(run)), "coarse"]
    for network, path in ((first, run), (second, coarse)):
        held = analysis.load_weights(path)
        image = analysis.prepare_image("a", held.decoder((photos / "cat/a.png").read_bytes()), 32, held.vit.patch_size)
        position = [name.endswith("cat/a.png") or name == "cat/a.png" for name in against["images"]].index(True)
        maps, _ = analysis.attend(held, image, analysis.read_memory(held, image))
        assert network["cls"][position] == pytest.approx(float(maps[0, 0].max()), rel=1e-4)
        (box,) = report["images"][position]["boxes"]  # type: ignore[index]
        crop = image.crop(box, held.vit.patch_size)[None]
        maps, _ = analysis.attend(held, image, analysis.read_memory(held, image), crop)
        asked = network["queries"][position]
        assert asked["relations"][position] == "itself"
        assert asked["peaks"][position] == pytest.approx(float(maps[0, 0].max()), rel=1e-4)
    words = {word for query in first["queries"] for word in query["relations"]}
    assert {"itself", "mismatched"} <= words


def test_networks_that_cannot_be_shown_together_are_refused(
    run: Path, coarse: Path, photos: Path, tmp_path: Path
) -> None:
    cases: list[tuple[Path, dict[str, object], str]] = [
        (photos / "cat/a.png", {}, "give two images or more"),
        (photos, {"across": 0}, "across=2 or more"),
    ]
    for images, settings, sentence in cases:
        with pytest.raises(UserError, match=sentence):
            draw("queries", run, images, tmp_path / "out", against=str(coarse), **settings)
        assert not list((tmp_path / "out").glob("*.png"))
    with pytest.raises(UserError, match="nowhere do not exist"):
        draw("queries", run, photos, tmp_path / "out", against=str(tmp_path / "nowhere"))
