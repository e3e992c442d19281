"""Names from outside: harmless on a terminal, true in files, and legible in pictures."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFont

from adclr import cli
from adclr.evals.accuracy import draw_confusion
from adclr.features import drawing
from adclr.features.drawing import Tile
from adclr.system import fonts
from adclr.system.progress import ProgressLine
from adclr.system.text import printable
from adclr.training import launch
from adclr.weights.backbone import architecture, save_backbone
from tiny import tiny

ESCAPES = "\x1b]0;owned\x07\x1b[2J"  # sets the title of the window and clears the screen
REVERSED = "\u202egnp.exe"  # shown as exe.png by a terminal that follows bidi overrides


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a.jpg", "a.jpg"),
        ("Fotos/Äpfel und Bäume 犬 собака.jpg", "Fotos/Äpfel und Bäume 犬 собака.jpg"),
        ("Screenshot 3.10\u202fPM.png", "Screenshot 3.10\u202fPM.png"),  # as macOS names them
        ("من\u200cاین.jpg", "من\u200cاین.jpg"),  # Persian needs its joiners
        ("\x1b[31mred", "\\x1b[31mred"),
        ("two\nlines\ttab", "two\\nlines\\ttab"),
        (REVERSED, "\\u202egnp.exe"),
        ("\x9b2J\x7f", "\\x9b2J\\x7f"),
        ("a\u2028b\udce9", "a\\u2028b\\udce9"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped_and_all_else_kept(name: str, shown: str) -> None:
    assert printable(name) == shown


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Three images and two broken files whose names a terminal would obey."""
    folder, rng = tmp_path / "photos", np.random.default_rng(0)
    folder.mkdir()
    for number in range(3):
        Image.fromarray(rng.integers(0, 256, (24, 24, 3), np.uint8)).save(folder / f"{number}{ESCAPES}.png")
    (folder / f"broken{ESCAPES}\n.png").write_text("no image")
    (folder / f"broken{REVERSED}.png").write_text("no image")
    return folder


def assert_harmless(text: str) -> None:
    assert not {"\x1b", "\x07", "\u202e"} & set(text), text
    assert "\\x1b]0;owned" in text


def test_the_doctor_prints_names_that_a_terminal_does_not_obey(
    hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["doctor", str(hostile), "--out", str(tmp_path / "report"), "num_workers=1"])
    assert_harmless("".join(capsys.readouterr()))
    assert_harmless((tmp_path / "report" / "doctor.txt").read_text())  # for people, who read it on a terminal
    troubles = json.loads((tmp_path / "report" / "doctor.json").read_text())["troubles"]
    assert any(line.startswith(f"broken{ESCAPES}\n.png: ") for line in troubles["unreadable"])  # the true name


def test_skipped_images_are_printed_harmlessly(
    hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny()
    save_backbone(tmp_path / "w", architecture(settings).build().state_dict(), settings)
    out = tmp_path / "pictures"
    cli.main(["visualize", "attention", str(tmp_path / "w"), str(hostile), "--out", str(out), "device=cpu"])
    err = capsys.readouterr().err
    assert_harmless(err)
    assert err.count("skipped ") == 2
    rows = json.loads((tmp_path / "pictures" / "attention.json").read_text())["images"]
    assert rows[0]["name"] == f"0{ESCAPES}.png"


def test_errors_are_one_harmless_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["doctor", f"{tmp_path}/no{ESCAPES}\nwhere"],  # said by a UserError
        ["pretrain", "a", f"b{ESCAPES}\n", "--out", "c"],  # said by the parser
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main(words)
        err = capsys.readouterr().err
        assert_harmless(err)
        assert err.count("\n") == 1


def test_a_damaged_shard_is_named_harmlessly(hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = tmp_path / "a.tar"
    with tarfile.open(shard, "w") as archive:
        for path in sorted(hostile.glob("[0-9]*")):
            archive.add(path, path.name)
        end = archive.offset
    shard.write_bytes(shard.read_bytes()[:end])
    changes = {"allow_damaged_shards": True, "train.batch_size": 1}
    launch.prepare(shard, tmp_path / "run", "adclr_small", changes)
    assert_harmless(capsys.readouterr().err)


def test_the_output_is_named_harmlessly(hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, settings = tmp_path / f"w{ESCAPES}", tiny()
    save_backbone(weights, architecture(settings).build().state_dict(), settings)
    (hostile / f"broken{REVERSED}.png").unlink()
    images, out = str(hostile), str(tmp_path / f"out{ESCAPES}")
    for words in (
        ["doctor", images, "--out", out, "num_workers=1"],
        ["plan", "--images", "99", "--recipe", "adclr_small", "--gpu", "h200", "--json", f"{out}.json"],
        ["visualize", "pca", str(weights), images, "--out", f"{out}_pca", "device=cpu"],
        ["embed", str(weights), images, "--out", f"{out}_embed", "device=cpu"],
        ["embed", str(weights), images, "--out", f"{out}_embed", "device=cpu"],  # is finished
        ["evaluate", "matching", "--weights", str(weights), "--data", images, "device=cpu"],
        ["export", str(weights), "--to", "safetensors", "--out", f"{out}_export"],
    ):
        cli.main(words)
        assert_harmless("".join(capsys.readouterr()))


def test_lines_that_stay_are_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine("reading", 1) as line:
        line.say(f"skipped a{ESCAPES}.png")
        line.move(1, f"b{ESCAPES}.png")
    assert_harmless(capsys.readouterr().err)


# -- in pictures --


DEJAVU = any(path.endswith("/DejaVuSans.ttf") for path in fonts._paths())


def ink(image: Image.Image) -> int:
    return int((np.asarray(image.convert("L")) < 128).sum())


@pytest.fixture
def no_fonts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine on which no font is installed."""
    monkeypatch.setattr(fonts, "font_folders", list)
    fonts.clear_caches()
    yield
    fonts.clear_caches()


def name_of_row(name: str) -> Image.Image:
    """What a sheet draws beside a row."""
    sheet = drawing.compose_sheet([[Tile(Image.new("RGB", (60, 60), "white"))]], [name])
    return sheet.crop((0, 0, sheet.width - 60 - drawing.PAD, sheet.height))


@pytest.mark.skipif(not DEJAVU, reason="DejaVu is not installed here")
def test_letters_of_other_scripts_are_drawn_from_a_font_of_the_system() -> None:
    dejavu = ImageFont.truetype("DejaVuSans.ttf", 13)
    for name in ("Äpfel", "собака", "σκύλος"):
        lettering = fonts.drawable_text(name, 13)
        assert lettering.text == name
        assert lettering.font.getlength(name) == dejavu.getlength(name)
        assert ink(name_of_row(name)) > 20
    drawn = [np.asarray(name_of_row(name)).tobytes() for name in ("собака", "кошка", "??????")]
    assert len(set(drawn)) == 3  # neither boxes nor question marks


@pytest.mark.skipif(not DEJAVU, reason="DejaVu is not installed here")
@pytest.mark.parametrize("sign", ["\u093f", "\u094d", "\u0e34"])  # of Hindi and Thai
def test_vowel_signs_that_a_font_lacks_are_not_drawn_as_boxes(sign: str) -> None:
    dejavu = next(path for path in fonts._paths() if path.endswith("/DejaVuSans.ttf"))
    assert not fonts._has(dejavu, sign)
    assert fonts._spell_out(f"é{sign}", {sign}, dejavu) == f"éU+{ord(sign):04X}"


@pytest.mark.usefixtures("no_fonts")
def test_accents_and_spaces_of_other_kinds_are_drawn_as_letters_and_spaces() -> None:
    assert fonts.drawable_text("cafe\u0301", 13).text == "cafe"  # as macOS writes the name of a file
    assert fonts.drawable_text("Screenshot 9.41\u202fAM\u3000a\u00a0b", 13).text == "Screenshot 9.41 AM a b"


@pytest.mark.usefixtures("no_fonts")
def test_letters_that_no_font_has_are_spelled(capsys: pytest.CaptureFixture[str]) -> None:
    assert fonts.drawable_text("café", 13).text == "cafe"  # without its accent it is still read
    assert fonts.drawable_text("犬猫 dog", 13).text == "U+72AC-732B dog"
    assert fonts.drawable_text("犬 again", 13).text == "U+72AC again"
    err = capsys.readouterr().err
    assert err.count("\n") == 1  # said once
    assert "no font" in err
    assert "犬" in err


def test_control_characters_are_not_drawn() -> None:
    assert fonts.drawable_text(f"a{ESCAPES}\n.png", 13).text == "a\\x1b]0;owned\\x07\\x1b[2J\\n.png"


@pytest.mark.usefixtures("no_fonts")
@pytest.mark.parametrize("classes", [["犬", "猫"], ["dog", "cat"]])
def test_classes_of_the_confusions_are_told_apart(tmp_path: Path, classes: list[str]) -> None:
    counts = np.array([[5, 0], [1, 4]])
    draw_confusion(tmp_path / "a.png", counts, classes)
    draw_confusion(tmp_path / "b.png", counts, classes[::-1])
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()
