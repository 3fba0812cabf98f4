"""Decoding, encoding and resizing of images, as functions for `map`.

Each uses the fastest installed library, and has the same results with each of them: of JPEG images
up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from headrace.arguments import check_flag, check_int
from headrace.errors import DataLossError, InvalidArgumentError, MissingDependencyError
from headrace.sources.image_libraries import ImageArray, UnsupportedImageError, load_library

__all__ = [
    "ResizeMethod",
    "check_channels",
    "check_size",
    "decode_image",
    "decode_jpeg",
    "decode_png",
    "encode_jpeg",
    "encode_png",
    "resize",
]

ResizeMethod: TypeAlias = Literal["bilinear", "nearest"]

#: Libraries for each task, fastest first, except that Pillow knows more kinds of PNG images.
_FOR_DECODING_JPEG = ("simplejpeg", "opencv", "pillow")
_FOR_ENCODING_JPEG = ("simplejpeg", "pillow", "opencv")
_FOR_OTHER_IMAGES = ("pillow", "opencv")
_FOR_RESIZING = ("opencv", "pillow")

_SIGNATURES = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"BM": "BMP",
}


def decode_image(data: bytes, channels: int = 0) -> ImageArray:
    """Decode a JPEG, PNG, GIF, BMP or WebP image to a uint8 array (height, width, channels).

    Needs Pillow (`pip install 'headrace[images]'`) or OpenCV; JPEG images are decoded by
    simplejpeg or OpenCV where they are installed, which is about 1.7 times as fast.

    >>> data = hr.io.encode_png(np.zeros((2, 3, 3), np.uint8))
    >>> hr.io.decode_image(data).shape
    (2, 3, 3)
    >>> images = hr.Dataset.from_random_access([data, data]).map(hr.io.decode_image).batch(2)
    >>> next(iter(images)).shape
    (2, 2, 3, 3)

    Args:
        data: Content of an image file. Of an animation, the first frame is decoded.
        channels: 1 for grey, 3 for RGB, 4 for RGBA; 0 for those of the image (2 are grey and
            alpha), and 3 for GIF.

    Raises:
        DataLossError: If the data is truncated, damaged, or no such image.
    """
    check_channels(channels)
    kind = _image_kind(data)
    if kind != "JPEG":
        return _decode_other(data, kind, channels)
    if channels != 4:
        return _decode_jpeg(data, channels, 1)
    image = _decode_jpeg(data, 3, 1)
    return np.concatenate([image, np.full_like(image[..., :1], 255)], axis=2)


def decode_jpeg(data: bytes, channels: int = 0, ratio: int = 1) -> ImageArray:
    """Decode a JPEG image to a uint8 array (height, width, channels).

    >>> data = hr.io.encode_jpeg(np.full((20, 30, 3), 100, np.uint8))
    >>> hr.io.decode_jpeg(data).shape
    (20, 30, 3)
    >>> hr.io.decode_jpeg(data, channels=1, ratio=4).shape
    (5, 8, 1)

    Args:
        data: Content of a JPEG file.
        channels: 1 for grey, 3 for RGB; 0 for 1 if the image is grey, else 3.
        ratio: 1, 2, 4 or 8: how many times smaller the result is than the image, rounded up. This
            is faster than to decode the whole image and to shrink it.

    Raises:
        DataLossError: If the data is truncated or damaged. Errors within the compressed pixels that
            JPEG decoders recover from are not reported.
        InvalidArgumentError: If it is an image of another format.
    """
    check_channels(channels, (0, 1, 3))
    if ratio not in (1, 2, 4, 8):
        raise ValueError(f"`ratio` must be 1, 2, 4 or 8, but got {ratio!r}")
    _check_kind(data, "JPEG")
    return _decode_jpeg(data, channels, ratio)


def decode_png(data: bytes, channels: int = 0) -> ImageArray:
    """Decode a PNG image to a uint8 array (height, width, channels).

    Images of 16 bits per channel lose the lower 8, and palettes become colors.

    >>> image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    >>> bool((hr.io.decode_png(hr.io.encode_png(image)) == image).all())
    True

    Args:
        data: Content of a PNG file.
        channels: 1 for grey, 3 for RGB, 4 for RGBA; 0 for those of the image (2 are grey and
            alpha).

    Raises:
        DataLossError: If the data is truncated or damaged.
        InvalidArgumentError: If it is an image of another format.
    """
    check_channels(channels)
    _check_kind(data, "PNG")
    return _decode_other(data, "PNG", channels)


def encode_jpeg(image: ImageArray, quality: int = 95) -> bytes:
    r"""Encode an image as JPEG.

    >>> hr.io.encode_jpeg(np.zeros((4, 4, 1), np.uint8), quality=80)[:3]
    b'\xff\xd8\xff'

    Args:
        image: uint8 array of shape (height, width, 1) for grey, or (height, width, 3) for RGB.
        quality: 1 to 100.
    """
    image = _check_image(image, (1, 3))
    quality = check_int("quality", quality, minimum=1, maximum=100)
    library = _installed(_FOR_ENCODING_JPEG, "encode a JPEG image")[0]
    return bytes(library.encode_jpeg(image, quality))


def encode_png(image: ImageArray) -> bytes:
    r"""Encode an image as PNG, without loss.

    >>> hr.io.encode_png(np.zeros((4, 4, 3), np.uint8))[:4]
    b'\x89PNG'

    Args:
        image: uint8 array of shape (height, width, channels): 1 for grey, 2 for grey and alpha, 3
            for RGB, 4 for RGBA.
    """
    image = _check_image(image, (1, 2, 3, 4))
    # OpenCV writes none of 2 channels.
    names = _FOR_OTHER_IMAGES if image.shape[2] != 2 else ("pillow",)
    return bytes(_installed(names, "encode this PNG image")[0].encode_png(image))


def resize(
    image: ImageArray,
    size: tuple[int, int],
    method: ResizeMethod = "bilinear",
    antialias: bool = False,
) -> ImageArray:
    """Resize an image; its proportions are not kept.

    >>> image = np.array([[[0], [100]]], np.uint8)
    >>> hr.io.resize(image, (1, 4)).ravel().tolist()
    [0, 25, 75, 100]
    >>> hr.io.resize(image, (1, 4), "nearest").ravel().tolist()
    [0, 0, 100, 100]

    Args:
        image: uint8 array of shape (height, width, channels), with 1 to 4 channels.
        size: New height and width.
        method: "bilinear" interpolates between the 4 nearest pixels; "nearest" takes the nearest
            pixel, as needed for masks of labels.
        antialias: Whether "bilinear" averages over all pixels when it shrinks an image, which is
            smoother, and slower: only Pillow can do it.

    Returns:
        A new uint8 array of shape (size[0], size[1], channels).
    """
    image = _check_image(image, (1, 2, 3, 4))
    height, width = check_size(size)
    if method not in ("bilinear", "nearest"):
        raise ValueError(f'`method` must be "bilinear" or "nearest", but got {method!r}')
    check_flag("antialias", antialias, or_none=False)
    if image.shape[:2] == (height, width):
        return image.copy()
    if method == "nearest":
        rows = _nearest_indices(height, image.shape[0])
        nearest: ImageArray = image[rows[:, np.newaxis], _nearest_indices(width, image.shape[1])]
        return nearest
    if antialias:
        library = _installed(("pillow",), "resize with antialias=True")[0]
    else:
        library = _installed(_FOR_RESIZING, "resize an image")[0]
    resized: ImageArray = library.resize(image, (height, width), antialias)
    return resized


def check_channels(channels: object, allowed: Sequence[int] = (0, 1, 3, 4)) -> None:
    """Check a number of channels to decode to.

    Raises:
        ValueError: If it is none of `allowed`.
    """
    if channels not in allowed or isinstance(channels, bool):
        choices = f"{', '.join(map(str, allowed[:-1]))} or {allowed[-1]}"
        raise ValueError(f"`channels` must be {choices}, but got {channels!r}")


def check_size(size: object) -> tuple[int, int]:
    """Return a height and a width.

    Raises:
        TypeError: If the size is no pair of integers.
        ValueError: If one is not positive.
    """
    if not isinstance(size, Sequence | np.ndarray) or isinstance(size, str) or len(size) != 2:
        raise TypeError(f"`size` must be a height and a width, (h, w), but got {size!r}")
    return check_int("size[0]", size[0], minimum=1), check_int("size[1]", size[1], minimum=1)


def _check_image(image: object, channels: tuple[int, ...]) -> ImageArray:
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
        found = image.dtype if isinstance(image, np.ndarray) else type(image).__name__
        raise TypeError(f"`image` must be a uint8 array, but got {found}")
    if image.ndim != 3 or image.shape[2] not in channels or not image.size:
        fix = "; add the axis: image[..., np.newaxis]" if image.ndim == 2 else ""
        numbers = ", ".join(map(str, channels))
        raise ValueError(
            f"`image` must have the shape (height, width, channels) with channels in ({numbers}), "
            f"but got {image.shape}{fix}"
        )
    return np.ascontiguousarray(image)


def _nearest_indices(length: int, source_length: int) -> Any:
    """Return the index of the pixel at the center of each pixel of a resized axis."""
    return ((np.arange(length) + 0.5) * (source_length / length)).astype(np.intp)


def _check_kind(data: bytes, kind: str) -> None:
    found = _image_kind(data)
    if found != kind:
        raise InvalidArgumentError(
            f"the data is a {found} image, but a {kind} image was expected; hr.io.decode_image "
            "decodes either"
        )


def _image_kind(data: object) -> str:
    """Return the format of an image.

    Raises:
        TypeError: If the data is not bytes.
        DataLossError: If it is no image.
    """
    if not isinstance(data, bytes):
        fix = "; read the file first: pathlib.Path(name).read_bytes()"
        raise TypeError(
            "`data` must be the content of an image file, as bytes, but got "
            f"{type(data).__name__}{fix if isinstance(data, str) else ''}"
        )
    for signature, kind in _SIGNATURES.items():
        if data.startswith(signature):
            return kind
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    if not data:
        raise DataLossError("the data of the image is empty (0 bytes)")
    raise DataLossError(
        f"the data is no JPEG, PNG, GIF, BMP or WebP image: its {len(data)} bytes begin with "
        f"{data[:8]!r}"
    )


def _decode_jpeg(data: bytes, channels: int, ratio: int) -> ImageArray:
    reason: Exception | None = None
    for library in _installed(_FOR_DECODING_JPEG, "decode a JPEG image"):
        try:
            image: ImageArray = library.decode_jpeg(data, channels, ratio)
            return image
        except UnsupportedImageError as error:
            reason = error
        except MemoryError:
            raise
        except Exception as error:  # codecs may raise anything
            raise _damage_error(data, "JPEG", error) from error
    raise _damage_error(data, "JPEG", reason) from reason


def _decode_other(data: bytes, kind: str, channels: int) -> ImageArray:
    library = _installed(_FOR_OTHER_IMAGES, f"decode a {kind} image")[0]
    try:
        image: ImageArray = library.decode(data, kind, channels)
        return image
    except MemoryError:
        raise
    except Exception as error:  # codecs may raise anything
        raise _damage_error(data, kind, error) from error


def _damage_error(data: bytes, kind: str, reason: object) -> DataLossError:
    return DataLossError(f"the {kind} image of {len(data)} bytes is damaged: {reason}")


def _installed(names: Sequence[str], task: str) -> list[Any]:
    """Return the installed libraries of those named, at least one.

    Raises:
        MissingDependencyError: If none of them is installed.
    """
    found = [library for name in names if (library := load_library(name)) is not None]
    if not found:
        raise MissingDependencyError(
            f"cannot {task}: it requires {' or '.join(names)}, and none is installed; pip install "
            "'headrace[images]'"
        )
    return found
