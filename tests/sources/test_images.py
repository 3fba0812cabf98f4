"""Decoding, encoding and resizing of images; the installed libraries give the same results."""

from __future__ import annotations

import importlib.util
import io
import itertools
import pickle
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import DataLossError, FailedPreconditionError, InvalidArgumentError
from headrace.sources import images
from headrace.sources.image_libraries import load_library

Image = pytest.importorskip("PIL.Image")

MODULES = {"simplejpeg": "simplejpeg", "opencv": "cv2", "pillow": "PIL"}
INSTALLED = [name for name, module in MODULES.items() if importlib.util.find_spec(module)]
FUNCTIONS = (
    hr.io.decode_image,
    hr.io.decode_jpeg,
    hr.io.decode_png,
    hr.io.encode_jpeg,
    hr.io.encode_png,
    hr.io.resize,
)


def pattern(height: int, width: int, channels: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a smooth image with different channels."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [128 + 100 * np.sin(x / (7 + 3 * c) + y / (11 - c)) for c in range(channels)]
    return np.stack(waves, -1).astype(np.uint8)


def encoded(image: Any, kind: str, **options: Any) -> bytes:
    """Return an image encoded by Pillow."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def largest_difference(a: Any, b: Any) -> int:
    assert a.shape == b.shape
    assert a.dtype == b.dtype == np.uint8
    return int(np.abs(a.astype(int) - b).max())


def use_only(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(images, "load_library", lambda n: load_library(n) if n == name else None)
    return name


@pytest.fixture(params=INSTALLED)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make one library the only one that is found."""
    return use_only(request.param, monkeypatch)


@pytest.fixture(params=[name for name in INSTALLED if name != "simplejpeg"])
def general_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make one library the only one that is found, which is not for JPEG alone."""
    return use_only(request.param, monkeypatch)


@pytest.mark.parametrize("colors", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("shape", [(61, 83), (3, 40), (1, 1)])
def test_jpeg_is_decoded_as_by_pillow(library: str, colors: str, shape: tuple[int, int]) -> None:
    data = encoded(Image.fromarray(pattern(*shape, 3)).convert(colors), "JPEG")

    for channels, ratio in itertools.product((0, 1, 3), (1, 2, 4, 8)):
        found = hr.io.decode_jpeg(data, channels, ratio)

        expected = load_library("pillow").decode_jpeg(data, channels, ratio)
        height, width = (-(-length // ratio) for length in shape)
        assert found.shape == (height, width, channels or (1 if colors == "L" else 3))
        assert found.flags.writeable
        if min(shape) >= 8 or ratio == 1:  # else less than a block of pixels, which is padded
            assert largest_difference(found, expected) <= 3


def test_jpeg_with_alpha_is_opaque(library: str) -> None:
    data = encoded(pattern(9, 8, 3), "JPEG")

    found = hr.io.decode_image(data, channels=4)

    assert (found[..., 3] == 255).all()
    assert (found[..., :3] == hr.io.decode_image(data)).all()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("quality", [10, 95, 100])
def test_jpeg_is_encoded_as_by_pillow(library: str, channels: int, quality: int) -> None:
    image = pattern(61, 83, channels)

    data = hr.io.encode_jpeg(image, quality)

    expected = Image.open(io.BytesIO(encoded(image, "JPEG", quality=quality)))
    found = Image.open(io.BytesIO(data))
    assert found.size == expected.size
    assert found.layer == expected.layer  # the subsampling of each channel
    assert found.quantization == expected.quantization
    assert np.abs(np.array(found, int) - np.array(expected)).mean() < 1.5


@pytest.mark.parametrize("source", [1, 2, 3, 4])
def test_png_is_decoded_exactly(general_library: str, source: int) -> None:
    image = pattern(13, 17, source)
    data = encoded(image, "PNG")
    whole = Image.fromarray(image.squeeze(2) if source == 1 else image)

    for channels in (0, 1, 3, 4):
        mode = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}[channels or source]
        found = hr.io.decode_png(data, channels)

        assert found.shape == (13, 17, channels or source)
        # Brightness may be rounded differently.
        tolerance = 1 if channels == 1 and source > 2 else 0
        expected = np.array(whole.convert(mode)).reshape(found.shape)
        assert largest_difference(found, expected) <= tolerance
        assert (hr.io.decode_image(data, channels) == found).all()


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_png_is_encoded_without_loss(general_library: str, channels: int) -> None:
    image = pattern(13, 17, channels)

    assert (hr.io.decode_png(hr.io.encode_png(image)) == image).all()
    assert (hr.io.decode_png(hr.io.encode_png(image[::-1, ::2])) == image[::-1, ::2]).all()


def test_png_of_grey_and_alpha_is_encoded_without_loss() -> None:
    image = pattern(13, 17, 2)
    assert (hr.io.decode_png(hr.io.encode_png(image)) == image).all()


def test_png_with_16_bits_loses_the_lower_8(general_library: str) -> None:
    numbers = np.arange(0, 65536, 97, dtype=np.uint16)[:600].reshape(20, 30)
    data = encoded(Image.fromarray(numbers), "PNG")

    for channels in (0, 1, 3):
        found = hr.io.decode_png(data, channels)
        assert found.shape == (20, 30, channels or 1)
        assert (found == (numbers >> 8)[..., np.newaxis]).all()


def test_png_with_a_palette_is_decoded_to_colors(general_library: str) -> None:
    palette = Image.fromarray(pattern(13, 17, 3)).quantize(16)
    data = encoded(palette, "PNG")
    transparent = encoded(palette, "PNG", transparency=bytes(range(16)))

    assert (hr.io.decode_png(data) == np.array(palette.convert("RGB"))).all()
    assert hr.io.decode_png(transparent).shape == (13, 17, 4)
    for channels in (3, 4):
        found = hr.io.decode_png(transparent, channels)
        assert (found[..., :3] == np.array(palette.convert("RGB"))).all()


@pytest.mark.parametrize(
    ("kind", "options"), [("BMP", {}), ("GIF", {}), ("WEBP", {"lossless": True})]
)
def test_other_formats_are_decoded(
    general_library: str, kind: str, options: dict[str, Any]
) -> None:
    image = Image.fromarray(pattern(13, 17, 3)).quantize(200).convert("RGB")
    data = encoded(image, kind, **options)

    assert (hr.io.decode_image(data) == np.array(image)).all()
    assert hr.io.decode_image(data, channels=1).shape == (13, 17, 1)


def test_first_frame_of_an_animation_is_decoded(general_library: str) -> None:
    frames = [Image.fromarray(pattern(9, 9, 3)).quantize(200), Image.new("RGB", (9, 9))]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])

    assert (hr.io.decode_image(data) == np.array(frames[0].convert("RGB"))).all()


def test_orientation_is_ignored(library: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    data = encoded(pattern(20, 30, 3), "JPEG", exif=exif)

    assert hr.io.decode_jpeg(data).shape == (20, 30, 3)


@pytest.mark.parametrize("cut", [0.3, 0.7, 0.99])
def test_truncated_jpeg_is_an_error(library: str, cut: float) -> None:
    data = encoded(pattern(100, 100, 3), "JPEG")
    data = data[: int(len(data) * cut)]

    with pytest.raises(DataLossError, match=f"the JPEG image of {len(data)} bytes is damaged: ."):
        hr.io.decode_jpeg(data)


def test_jpeg_errors_that_decoders_recover_from_are_tolerated(library: str) -> None:
    data = bytearray(encoded(pattern(200, 200, 3), "JPEG"))
    # More compressed data than the pixels need.
    data[-2:-2] = bytes(range(200)) * 2

    found = hr.io.decode_jpeg(bytes(data))

    assert largest_difference(found, load_library("pillow").decode_jpeg(bytes(data), 0, 1)) <= 3


def test_damaged_png_is_an_error(general_library: str) -> None:
    data = encoded(np.random.default_rng(1).integers(0, 255, (50, 50, 3), np.uint8), "PNG")
    changed = bytearray(data)
    changed[len(data) // 2] ^= 255

    for damaged in (data[: len(data) // 2], data[:20], bytes(changed)):
        with pytest.raises(DataLossError, match=r"the PNG image of \d+ bytes is damaged: ."):
            hr.io.decode_png(damaged)


def test_headers_alone_are_an_error(library: str) -> None:
    for data in (b"\xff\xd8\xff", b"\xff\xd8\xff" + bytes(100)):
        with pytest.raises(DataLossError, match="the JPEG image of"):
            hr.io.decode_image(data)


def test_data_that_is_no_image_is_an_error() -> None:
    with pytest.raises(DataLossError, match=r"empty \(0 bytes\)"):
        hr.io.decode_image(b"")
    with pytest.raises(DataLossError, match=r"its 9 bytes begin with b'some tex'"):
        hr.io.decode_jpeg(b"some text")
    with pytest.raises(InvalidArgumentError, match=r"a PNG image, but a JPEG image was expected"):
        hr.io.decode_jpeg(encoded(pattern(2, 2, 3), "PNG"))
    with pytest.raises(InvalidArgumentError, match=r"a JPEG image, but a PNG image was expected"):
        hr.io.decode_png(encoded(pattern(2, 2, 3), "JPEG"))


def test_wrong_arguments_are_errors() -> None:
    data, image = encoded(pattern(2, 2, 3), "JPEG"), pattern(2, 2, 3)
    for call, error, words in (
        (lambda: hr.io.decode_image("x.jpg"), TypeError, r"but got str; read the file first"),  # type: ignore[arg-type]
        (lambda: hr.io.decode_image(data, 2), ValueError, "must be 0, 1, 3 or 4, but got 2"),
        (lambda: hr.io.decode_jpeg(data, 4), ValueError, "must be 0, 1 or 3, but got 4"),
        (lambda: hr.io.decode_jpeg(data, ratio=3), ValueError, "must be 1, 2, 4 or 8, but got 3"),
        (lambda: hr.io.encode_jpeg(image, 101), ValueError, "`quality` must be at most 100"),
        (lambda: hr.io.encode_jpeg(image / 255), TypeError, "uint8 array, but got float64"),  # type: ignore[arg-type]
        (lambda: hr.io.encode_png(image[..., 0]), ValueError, r"add the axis: image\[\.\.\., np"),
        (
            lambda: hr.io.encode_jpeg(image[..., :2]),
            ValueError,
            r"in \(1, 3\), but got \(2, 2, 2\)",
        ),
        (lambda: hr.io.resize(image, 5), TypeError, r"a height and a width, \(h, w\), but got 5"),  # type: ignore[arg-type]
        (lambda: hr.io.resize(image, (5, 0)), ValueError, r"`size\[1\]` must be at least 1"),
        (lambda: hr.io.resize(image, (5, 5), "area"), ValueError, "\"nearest\", but got 'area'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(error, match=words):
            call()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [(30, 25), (61, 200), (5, 3), (200, 180), (1, 1)])
def test_bilinear_resize_interpolates_linearly(
    general_library: str, channels: int, size: tuple[int, int]
) -> None:
    image = pattern(61, 83, channels)

    found = hr.io.resize(image, size)

    def positions(length: int, source: int) -> Any:
        return np.clip((np.arange(length) + 0.5) * source / length - 0.5, 0, source - 1)

    y, x = positions(size[0], 61)[:, None, None], positions(size[1], 83)[None, :, None]
    top, left = np.floor(y).astype(int), np.floor(x).astype(int)
    bottom, right = np.minimum(top + 1, 60), np.minimum(left + 1, 82)
    c, dy, dx = np.arange(channels), y - top, x - left
    expected = (1 - dy) * ((1 - dx) * image[top, left, c] + dx * image[top, right, c]) + dy * (
        (1 - dx) * image[bottom, left, c] + dx * image[bottom, right, c]
    )
    assert found.shape == (*size, channels)
    assert found.dtype == np.uint8
    assert np.abs(found - expected).max() < 1.6


def test_nearest_resize_takes_existing_pixels() -> None:
    image = np.arange(6, dtype=np.uint8).reshape(2, 3, 1)

    assert hr.io.resize(image, (4, 6), "nearest")[..., 0].tolist() == [
        [0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5], [3, 3, 4, 4, 5, 5],
    ]  # fmt: skip
    assert hr.io.resize(image, (1, 1), "nearest").tolist() == [[[4]]]


def test_resize_to_the_same_size_copies() -> None:
    image = pattern(4, 5, 3)
    found = hr.io.resize(image, (4, 5))

    assert (found == image).all()
    assert not np.shares_memory(found, image)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_antialias_averages_over_all_pixels(channels: int) -> None:
    image = np.zeros((64, 64, channels), np.uint8)
    image[::2] = 200  # stripes

    smooth = hr.io.resize(image, (8, 8), antialias=True)

    assert np.abs(smooth.astype(int) - 100).max() <= 10


def test_images_with_too_many_pixels_are_an_error(library: str) -> None:
    data = bytearray(encoded(pattern(8, 8, 3), "JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"

    with pytest.raises(DataLossError, match="is damaged"):
        hr.io.decode_jpeg(bytes(data))


def test_functions_are_pickled_by_name() -> None:
    for function in FUNCTIONS:
        assert pickle.loads(pickle.dumps(function)) is function


def test_error_without_libraries_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(pattern(2, 2, 3), "PNG")
    monkeypatch.setattr(images, "load_library", lambda name: None)

    with pytest.raises(
        FailedPreconditionError,
        match=r"cannot decode a PNG image: it requires pillow or .* install 'headrace\[images\]'",
    ):
        hr.io.decode_image(data)


def test_images_are_decoded_on_workers() -> None:
    data = [hr.io.encode_jpeg(np.full((8, 8, 3), 10 * n, np.uint8)) for n in range(10)]
    dataset = hr.Dataset.from_random_access(data).map(hr.io.decode_image, num_parallel_calls=2)

    with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
        distributed = dataset.apply(hr.service.distribute("distributed_epoch", cluster.target))
        found = sorted(int(image[0, 0, 0]) for image in distributed)

    assert found == [10 * n for n in range(10)]
