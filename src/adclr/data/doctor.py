"""`adclr doctor`: finds what is wrong with a collection of images before any GPU hour is spent on it."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydantic import Field

from adclr.config import auto
from adclr.config.parsing import Count, Positive, Section, UserError
from adclr.config.settings import Data
from adclr.data import collection
from adclr.data.collection import open_source
from adclr.data.decode import FORMATS, Decoder, Pixels, Unreadable, is_deep, tiff_bands
from adclr.data.sources import Source, error_reason
from adclr.data.sources.store_reader import read_ahead
from adclr.data.sources.tar_shards import TarShards
from adclr.system import machine, outputs
from adclr.system.files import check_writable, write_atomically, write_json
from adclr.system.machine import cpu_count
from adclr.system.progress import track
from adclr.system.runs import provenance
from adclr.system.store_urls import conceal
from adclr.system.text import format_size, printable, shell_join

TINY = 32  # pixels of the shorter side; below, a crop shows next to nothing
STRETCHED = 4.0  # longer side over shorter
FLAT = 8  # levels of 256 between the least and the most of every channel; a compressed plain color has some
SHOWN, CELL = 48, 96  # images of the contact sheet, and their pixels
LISTED = 5  # examples named for each kind of problem
BINS = (32, 64, 128, 224, 320, 480, 640, 1024, 2048, 4096)
DEEP_MODES = ("I", "F")
MOST_PAGES = 256  # of a TIFF file that are examined
UNLIKE = 0.1  # of 1: a mean or deviation this far from those that recipes start from is worth setting
LEAST_STD = 0.001  # that data.std takes
LEVELS = np.arange(256) / 255
DEEP_COLORS = ";16"  # behind a mode of Pillow, which is the same for colors of 8 bits and of more


class DoctorSettings(Section):
    """The settings of `adclr doctor`."""

    max_pixels: Count = Field(Data().max_pixels, description="images with more pixels are rejected before decoding")
    num_channels: Count = Field(3, description="see model.num_channels of adclr pretrain")
    max_value: Positive | None = Field(None, description="see data.max_value of adclr pretrain")
    num_workers: Count | None = Field(None, description="threads; null: one per CPU core")


@dataclass(frozen=True)
class Finding:
    """What is known of one image."""

    path: str
    bytes: int
    digest: str  # of the file
    problem: str | None = None  # why it cannot be used; then the fields below say nothing
    format: str = ""
    mode: str = ""
    height: int = 0
    width: int = 0
    flat: bool = False
    bands: int = 0  # of a TIFF file, also of one that cannot be used; 0: not a TIFF file
    pages: int = 1  # of a TIFF file, all of one size
    mean: tuple[float, ...] = ()  # of each channel, of 1
    square: tuple[float, ...] = ()  # the same of the squares

    @property
    def stretched(self) -> bool:
        """Return whether the image is much longer than wide, or the other way round."""
        return max(self.height, self.width) > STRETCHED * min(self.height, self.width)


def _examine(source: Source, index: int, decoder: Decoder) -> Finding:
    """Read, decode and examine one image."""
    path = source.paths[index]
    try:
        data = source.read(index)
    except OSError as error:
        return Finding(path, 0, "", error_reason(error))
    digest, bands = blake2b(data, digest_size=16).hexdigest(), tiff_bands(data) or 0
    try:
        pixels = decoder(data)
    except Unreadable as error:
        return Finding(path, len(data), digest, str(error), bands=bands)
    format_, mode, pages = "TIFF", f"{decoder.num_channels} bands", 1
    if decoder.num_channels in (1, 3):
        format_, mode, pages = _kind(data)
    flat = bool(np.ptp(pixels, axis=(1, 2)).max() <= FLAT)
    # by Pillow's histogram: 26 ms for 12 megapixels in 3 channels, where NumPy's sums take 460
    counts = np.array([Image.fromarray(channel).histogram() for channel in pixels])
    shares = counts / counts.sum(axis=1, keepdims=True)
    mean, square = tuple((shares @ LEVELS).tolist()), tuple((shares @ LEVELS**2).tolist())
    _, height, width = pixels.shape
    return Finding(path, len(data), digest, None, format_, mode, height, width, flat, bands, pages, mean, square)


def _kind(data: bytes) -> tuple[str, str, int]:
    """Return (format, mode, number of pages) of a file."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            mode = f"{image.mode}{DEEP_COLORS}" if is_deep(image, data) else image.mode
            return image.format or "?", mode, _pages(image) if image.format == "TIFF" else 1
    except Exception:  # a TIFF file of numbers that Pillow does not know, which another decoder has read
        return "TIFF", f"{tiff_bands(data)} bands", 1


def _pages(image: Image.Image) -> int:
    """Return the pages of a TIFF file if all have one size, as bands do and the levels of a pyramid do not; else 1."""
    count, size = min(getattr(image, "n_frames", 1), MOST_PAGES), image.size
    for page in range(1, count):
        image.seek(page)
        if image.size != size:
            return 1
    return count


def _examine_all(source: Source, decoder: Decoder, num_workers: int) -> Iterator[Finding]:
    """Yield all findings in order; few are queued at a time, since each holds a decoded image."""
    with ThreadPoolExecutor(num_workers) as pool:
        numbers = read_ahead(range(len(source)), lambda index: [index], source)
        queued = [pool.submit(_examine, source, i, decoder) for i in islice(numbers, 4 * num_workers)]
        for index in range(len(source)):
            yield queued[index % len(queued)].result()
            following = next(numbers, None)
            if following is not None:
                queued[index % len(queued)] = pool.submit(_examine, source, following, decoder)


def _diagnose(
    data: str, source: Source, findings: Sequence[Finding], settings: DoctorSettings, memory: int | None
) -> dict[str, Any]:
    """Return the report: numbers, problems with examples, and advice."""
    good = [finding for finding in findings if finding.problem is None]
    digests: set[str] = set()
    duplicates = []
    for finding in good:
        if finding.digest in digests:
            duplicates.append(finding)
        digests.add(finding.digest)
    sides = np.array([min(finding.height, finding.width) for finding in good])
    problems, facts = ({}, {}) if source.listing is None else (source.listing.problems, source.listing.facts)
    troubles = {
        "damaged shards": [f"{path}: {problem}" for path, problem in problems.items() if path in facts],
        "dangling links": [f"{path}: {problem}" for path, problem in problems.items() if path not in facts],
        "unreadable": [f"{finding.path}: {finding.problem}" for finding in findings if finding.problem is not None],
        "duplicates": [finding.path for finding in duplicates],
        "tiny": [finding.path for finding in good if min(finding.height, finding.width) < TINY],
        "stretched": [finding.path for finding in good if finding.stretched],
        "constant": [finding.path for finding in good if finding.flat],
    }
    mean, std = _colors(good)
    total = sum(finding.bytes for finding in findings)
    report: dict[str, Any] = {
        "data": data,
        "images": len(findings),
        "readable": len(good),
        "bytes": total,
        "gigabytes": total / 1e9,
        "formats": dict(Counter(finding.format for finding in good).most_common()),
        "modes": dict(Counter(finding.mode for finding in good).most_common()),
        "mean": mean,
        "std": std,
        "shorter_side": _spread(sides),
        "histogram": _histogram(sides),
        "troubles": troubles,
        "damaged_shards": _readable_of(source, [path for path in problems if path in facts]),
        "advice": [],
    }
    report["advice"] = _advice(report, findings, good, settings, memory)
    return report


def _colors(good: Sequence[Finding]) -> tuple[list[float], list[float]]:
    """Return mean and deviation of each channel, of 1, with the same weight for every image, as in training."""
    if not good:
        return [], []
    mean = np.mean([finding.mean for finding in good], axis=0)
    variance = np.mean([finding.square for finding in good], axis=0) - mean**2
    std = np.sqrt(variance.clip(0)).clip(LEAST_STD)
    return [round(float(x), 3) for x in mean], [round(float(x), 3) for x in std]


def _readable_of(source: Source, shards: Sequence[str]) -> dict[str, list[str]]:
    """Return the readable images of each damaged shard."""
    images: dict[str, list[str]] = {shard: [] for shard in shards}
    if isinstance(source, TarShards):
        for index, path in enumerate(source.paths if shards else ()):
            if source.file(index) in images:
                images[source.file(index)].append(path)
    return images


def _spread(sides: np.ndarray[Any, Any]) -> dict[str, int]:
    if not len(sides):
        return {}
    return {name: int(np.quantile(sides, q)) for name, q in (("least", 0), ("median", 0.5), ("most", 1))}


def _histogram(sides: np.ndarray[Any, Any]) -> dict[str, int]:
    """Count the shorter sides in each range of pixels."""
    edges = [0, *BINS, 2**31]
    counts, _ = np.histogram(sides, edges)
    names = [f"<{BINS[0]}", *(f"{a}-{b - 1}" for a, b in pairwise(BINS)), f">={BINS[-1]}"]
    return {name: int(count) for name, count in zip(names, counts, strict=True) if count}


def _advice(
    report: dict[str, Any],
    findings: Sequence[Finding],
    good: Sequence[Finding],
    settings: DoctorSettings,
    memory: int | None,
) -> list[str]:
    advice = []
    counts = {name: len(paths) for name, paths in report["troubles"].items()}
    num_gray = sum(finding.mode in ("L", "1", "LA") or finding.mode.startswith(DEEP_MODES) for finding in good)
    colors = _color_settings(report["mean"], report["std"], settings.num_channels, settings.max_value)
    if good:
        choice = auto.choose(len(good), report["shorter_side"]["median"], memory)
        values = [f"{key}={value}" for key, value in choice.settings.items()]
        values += colors if settings.num_channels != 3 else []
        values += ["data.allow_damaged_shards=true"] if counts["damaged shards"] else []
        out = re.sub(r"[^\w.-]+", "_", Path(report["data"]).stem).strip("_.-") or "images"
        words = ["adclr", "pretrain", report["data"], "--out", f"runs/{out}", "--recipe", choice.recipe, *values]
        advice += [shell_join(words), *choice.reasons]
    else:
        advice.append("nothing here can be read; look at the reasons above")
    advice += _advice_on_bands(report["data"], findings, settings.num_channels)
    if counts["damaged shards"]:
        advice.append("write the damaged shards again; without data.allow_damaged_shards=true a run refuses them")
    if counts["dangling links"]:
        advice.append(f"{counts['dangling links']} links lead nowhere and are passed over; restore what they lead to")
    if not good:
        return advice
    share = counts["unreadable"] / report["images"]
    if share > Data().max_unreadable:
        advice.append(f"{share:.0%} cannot be read, too many for a run; fix them or raise data.max_unreadable")
    if counts["duplicates"] > 0.01 * len(good):
        advice.append(f"{counts['duplicates']} files are copies of others; what is shown twice is learned twice")
    if counts["tiny"] > 0.1 * len(good):
        advice.append(f"{counts['tiny']} images are smaller than {TINY} pixels and will be enlarged; leave them out")
    deep = sum(finding.mode.startswith(DEEP_MODES) or finding.mode.endswith(DEEP_COLORS) for finding in good)
    if settings.max_value is None and (deep or settings.num_channels not in (1, 3)):
        which = f"{deep} images have more than 8 bits" if deep else "if the bands have more than 8 bits"
        advice.append(
            f"{which}{';' if deep else ','} give max_value=WHITE here and data.max_value=WHITE in training: without it "
            "the range of each image is guessed from its largest value, and so are the mean and deviation above"
        )
    if settings.num_channels == 3 and num_gray == len(good):
        gray_settings = shell_join(_color_settings(report["mean"][:1], report["std"][:1], 1, settings.max_value))
        advice.append(f"all images are gray; {gray_settings} trains on one channel")
    elif settings.num_channels == 3 and (settings.max_value is not None or _unlike(report["mean"], report["std"])):
        advice.append(f"mean and deviation differ from the defaults of the recipes; set {shell_join(colors)}")
    return advice


def _color_settings(mean: list[float], std: list[float], num_channels: int, max_value: float | None) -> list[str]:
    """Return the settings with which a run uses the mean and deviation of the collection."""
    words = [f"data.max_value={max_value:g}"] if max_value is not None else []
    words += [f"data.mean={mean}", f"data.std={std}"]
    return words if num_channels == 3 else [f"model.num_channels={num_channels}", *words]


def _unlike(mean: list[float], std: list[float]) -> bool:
    """Return whether mean or deviation differ much from those that recipes start from."""
    defaults = Data()
    return bool(np.abs(np.array([mean, std]) - np.array([defaults.mean, defaults.std])).max() > UNLIKE)


def _advice_on_bands(data: str, findings: Sequence[Finding], num_channels: int) -> list[str]:
    """Return advice on TIFF files that have other bands than are read."""
    advice = []
    for bands, count in Counter(finding.bands for finding in findings).most_common():
        if bands not in (0, 1, 3, num_channels):
            command = shell_join(["adclr", "doctor", data, f"num_channels={bands}"])
            advice.append(
                f"{count} TIFF files have {bands} bands, not {num_channels}; {command} examines all of them, and "
                f"model.num_channels={bands} trains on them"
            )
    for pages, count in Counter(finding.pages for finding in findings).most_common():
        if pages > 1:
            command = shell_join(["adclr", "doctor", data, f"num_channels={pages}"])
            advice.append(
                f"{count} TIFF files have {pages} pages, of which the first is used; if they are bands, {command} "
                f"examines all of them, and model.num_channels={pages} trains on them"
            )
    return advice


def _describe(report: dict[str, Any]) -> str:
    """Return the report as text."""
    lines = [
        f"{report['images']} images, {format_size(report['gigabytes'])}; {report['readable']} can be read",
        "formats: " + (", ".join(f"{name} {count}" for name, count in report["formats"].items()) or "none"),
        "modes:   " + (", ".join(f"{name} {count}" for name, count in report["modes"].items()) or "none"),
    ]
    if report["mean"]:
        mean, std = (" ".join(f"{x:.3f}" for x in report[name]) for name in ("mean", "std"))
        lines.append(f"colors:  mean {mean}, standard deviation {std} of each channel, 0 to 1 (data.mean, data.std)")
    if report["shorter_side"]:
        spread = report["shorter_side"]
        lines += ["", f"shorter side: {spread['least']} to {spread['most']} pixels, median {spread['median']}"]
        most = max(report["histogram"].values())
        for name, count in report["histogram"].items():
            lines.append(f"  {name:>10}  {'█' * max(1, round(40 * count / most))} {count}")
    for name, examples in report["troubles"].items():
        if examples:
            lines += ["", f"{name}: {len(examples)}", *(f"  {printable(example)}" for example in examples[:LISTED])]
            if len(examples) > LISTED:
                lines.append(f"  and {len(examples) - LISTED} more")
    return "\n".join([*lines, "", "advice:", *(f"  {line}" for line in report["advice"])])


def _contact_sheet(source: Source, findings: Sequence[Finding], decoder: Decoder) -> Image.Image | None:
    """Return images spread over the collection, each whole, in equal cells."""
    good = [index for index, finding in enumerate(findings) if finding.problem is None]
    if not good:
        return None
    chosen = [good[i] for i in np.linspace(0, len(good) - 1, min(SHOWN, len(good))).astype(int)]
    columns = min(8, len(chosen))
    sheet = Image.new("RGB", (columns * CELL, -(-len(chosen) // columns) * CELL), "white")
    for cell, index in enumerate(chosen):
        pixels: Pixels = decoder(source.read(index))
        rgb = pixels if len(pixels) == 3 else pixels[[0, 0, 0]]
        picture = Image.fromarray(np.ascontiguousarray(rgb.transpose(1, 2, 0)))
        picture.thumbnail((CELL - 4, CELL - 4))
        left, top = cell % columns * CELL, cell // columns * CELL
        sheet.paste(picture, (left + (CELL - picture.width) // 2, top + (CELL - picture.height) // 2))
    return sheet


def examine_collection(data: str, out: Path, settings: DoctorSettings, overwrite: bool = False) -> dict[str, Any]:
    """Examine a collection, write doctor.json, doctor.txt and contact_sheet.png to `out`, and return the report."""
    check_writable(out)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; choose another --out")
    files = [out / name for name in ("doctor.json", "doctor.txt", "contact_sheet.png")]
    outputs.check_overwrite("doctor", files, overwrite, record=files[0])
    data = conceal(data)
    source = open_source(data, allow_damaged=True)
    collection.check_apart(out, source)
    collection.check_no_images(out, files[0], overwrite)
    decoder = Decoder(settings.max_pixels, settings.num_channels, settings.max_value)
    workers = settings.num_workers or cpu_count()
    findings = list(track(_examine_all(source, decoder, workers), "examining", len(source)))
    report = _diagnose(str(data), source, findings, settings, machine.gpu_bytes("auto"))
    text = _describe(report)
    print(text)
    sheet = _contact_sheet(source, findings, decoder)
    write_json(files[0], report | {"provenance": provenance() | outputs.signature("doctor")})
    write_atomically(files[1], f"{text}\n\n{outputs.author_words('doctor')}\n".encode("utf-8", "backslashreplace"))
    if sheet is not None:
        write_atomically(files[2], outputs.encode_png(sheet, "doctor"))
    sheet_name = ", contact_sheet.png" if sheet is not None else ""
    print(f"\nwritten to {printable(str(out))}: doctor.json, doctor.txt{sheet_name}")
    return report
