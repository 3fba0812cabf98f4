"""Image codecs of optional libraries: simplejpeg, OpenCV and Pillow; the only file that uses them.

All results are new uint8 arrays of shape (height, width, channels), with channels in the order
grey, grey and alpha, RGB, or RGBA. Numbers of 16 bits lose their lower 8. Orientation (EXIF) and
color profiles are ignored. The functions of the libraries that do the work release the GIL.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["ImageArray", "OpenCV", "Pillow", "SimpleJpeg", "UnsupportedImageError", "load_library"]

ImageArray: TypeAlias = NDArray[np.uint8]

_MAX_PIXELS = 178_956_970
"""Largest number of pixels to decode, which is Pillow's limit: a header may claim anything."""
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}


class UnsupportedImageError(Exception):
    """The library cannot decode this kind of image, but another one may."""


class SimpleJpeg:
    """The codec of simplejpeg, for JPEG only; the fastest."""

    def __init__(self) -> None:
        import simplejpeg  # noqa: PLC0415 - optional dependency

        self._module: Any = simplejpeg

    def decode_jpeg(self, data: bytes, channels: int, ratio: int) -> ImageArray:
        """Decode a JPEG image; `channels` is 0, 1 or 3."""
        try:
            height, width, colors, _ = self._module.decode_jpeg_header(data, strict=False)
        except ValueError as error:
            raise UnsupportedImageError(str(error)) from error
        if height * width > _MAX_PIXELS:
            raise ValueError(f"its header claims {height} x {width} pixels")
        shape = {} if ratio == 1 else {"min_height": height // ratio, "min_width": width // ratio}
        decode = functools.partial(
            self._module.decode_jpeg,
            data,
            "GRAY" if (channels or (1 if colors == "Gray" else 3)) == 1 else "RGB",
            **{name: max(length, 1) for name, length in shape.items()},
        )
        try:
            image = decode()
        except ValueError as error:
            # libjpeg recovers from this, and the other libraries do not report it.
            if "Corrupt JPEG data" not in str(error):
                raise
            image = decode(strict=False)
        expected = (-(-height // ratio), -(-width // ratio))
        if image.shape[:2] != expected:
            raise UnsupportedImageError(f"it cannot decode {height} x {width} pixels to {expected}")
        return _with_channel_axis(image)

    def encode_jpeg(self, image: ImageArray, quality: int) -> bytes:
        """Encode an image of 1 or 3 channels."""
        is_grey = image.shape[2] == 1
        return bytes(
            self._module.encode_jpeg(
                image,
                quality,
                colorspace="GRAY" if is_grey else "RGB",
                colorsubsampling="Gray" if is_grey else "420",
            )
        )


class OpenCV:
    """The codecs and the resizing of OpenCV, whose images are in the order BGR."""

    def __init__(self) -> None:
        import cv2  # noqa: PLC0415 - optional dependency

        self._module: Any = cv2

    def decode_jpeg(self, data: bytes, channels: int, ratio: int) -> ImageArray:
        """Decode a JPEG image; `channels` is 0, 1 or 3."""
        cv2 = self._module
        colors = {0: cv2.IMREAD_ANYCOLOR, 1: cv2.IMREAD_GRAYSCALE, 3: cv2.IMREAD_COLOR}[channels]
        scales = {
            1: 0,
            2: cv2.IMREAD_REDUCED_GRAYSCALE_2,
            4: cv2.IMREAD_REDUCED_GRAYSCALE_4,
            8: cv2.IMREAD_REDUCED_GRAYSCALE_8,
        }
        image = self._decode(data, colors | scales[ratio] | cv2.IMREAD_IGNORE_ORIENTATION)
        return self._convert(image, 1 if image.ndim == 2 else 3)

    def decode(self, data: bytes, kind: str, channels: int) -> ImageArray:
        """Decode an image of any other kind."""
        image = self._decode(data, self._module.IMREAD_UNCHANGED)
        if image.dtype == np.uint16:
            image = (image >> 8).astype(np.uint8)
        has_grey_and_alpha = kind == "PNG" and data[25] == 4  # the color type; decoded to BGRA
        if has_grey_and_alpha and channels < 3:
            return np.ascontiguousarray(image[..., ::3] if channels == 0 else image[..., :1])
        found = 1 if image.ndim == 2 else image.shape[2]
        return self._convert(image, channels or (3 if kind == "GIF" else found))

    def encode_jpeg(self, image: ImageArray, quality: int) -> bytes:
        """Encode an image of 1 or 3 channels."""
        return self._encode(".jpg", image, [self._module.IMWRITE_JPEG_QUALITY, quality])

    def encode_png(self, image: ImageArray) -> bytes:
        """Encode an image of 1, 3 or 4 channels."""
        return self._encode(".png", image, [])

    def resize(self, image: ImageArray, size: tuple[int, int], antialias: bool) -> ImageArray:
        """Interpolate linearly between the nearest pixels; `antialias` must be False."""
        resized = self._module.resize(image, size[::-1], interpolation=self._module.INTER_LINEAR)
        return _with_channel_axis(resized)

    def _decode(self, data: bytes, flags: int) -> NDArray[Any]:
        image: NDArray[Any] | None = self._module.imdecode(np.frombuffer(data, np.uint8), flags)
        if image is None:
            raise ValueError("OpenCV cannot decode it")
        return image

    def _convert(self, image: ImageArray, channels: int) -> ImageArray:
        """Convert from grey, BGR or BGRA to the given channels."""
        source = {1: "GRAY", 3: "BGR", 4: "BGRA"}[1 if image.ndim == 2 else image.shape[2]]
        target = {1: "GRAY", 3: "RGB", 4: "RGBA"}[channels]
        if source != target:
            image = self._module.cvtColor(image, getattr(self._module, f"COLOR_{source}2{target}"))
        return _with_channel_axis(image)

    def _encode(self, extension: str, image: ImageArray, options: list[int]) -> bytes:
        channels = image.shape[2]
        if channels > 1:
            code = self._module.COLOR_RGB2BGR if channels == 3 else self._module.COLOR_RGBA2BGRA
            image = self._module.cvtColor(image, code)
        _, encoded = self._module.imencode(extension, image, options)
        return bytes(encoded)


class Pillow:
    """The codecs and the resizing of Pillow."""

    def __init__(self) -> None:
        from PIL import Image  # noqa: PLC0415 - optional dependency

        self._module: Any = Image

    def decode_jpeg(self, data: bytes, channels: int, ratio: int) -> ImageArray:
        """Decode a JPEG image; `channels` is 0, 1 or 3."""
        image = self._module.open(io.BytesIO(data), formats=("JPEG",))
        width, height = image.size
        # libjpeg itself computes a smaller image and the brightness.
        image.draft(
            "L" if channels == 1 else None, (max(width // ratio, 1), max(height // ratio, 1))
        )
        expected = (-(-width // ratio), -(-height // ratio))
        if image.size != expected:  # an image of very few pixels
            image = self._module.open(io.BytesIO(data), formats=("JPEG",)).reduce(ratio)
        return self._convert(image, channels or (1 if image.mode == "L" else 3))

    def decode(self, data: bytes, kind: str, channels: int) -> ImageArray:
        """Decode an image of any other kind; of an animation the first frame."""
        image = self._module.open(io.BytesIO(data), formats=(kind,))
        if image.mode.startswith("I"):  # 16 bits, which `convert` would clip
            image = self._module.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        is_grey = image.mode in ("1", "L", "LA")
        has_alpha = image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info
        if has_alpha and image.mode == "P":
            image = image.convert("RGBA")
        found = (1 if is_grey else 3) + (has_alpha and kind != "GIF")
        return self._convert(image, channels or found)

    def encode_jpeg(self, image: ImageArray, quality: int) -> bytes:
        """Encode an image of 1 or 3 channels."""
        return self._encode(image, "JPEG", quality=quality)

    def encode_png(self, image: ImageArray) -> bytes:
        """Encode an image of 1 to 4 channels."""
        return self._encode(image, "PNG")

    def resize(self, image: ImageArray, size: tuple[int, int], antialias: bool) -> ImageArray:
        """Interpolate linearly between the nearest pixels, or with `antialias` between all."""
        height, width, channels = image.shape
        linear = self._module.Resampling.BILINEAR

        def resize(pixels: Any) -> Any:
            if antialias:
                return pixels.resize(size[::-1], linear)
            whole = (0, 0, width, height)
            return pixels.transform(size[::-1], self._module.Transform.EXTENT, whole, linear)

        if channels == 2:
            return np.stack([np.array(resize(self._wrap(image[..., i]))) for i in (0, 1)], -1)
        if channels == 4:
            # As CMYK: in RGBA, Pillow would weight the colors by alpha.
            return np.array(
                resize(self._module.frombuffer("CMYK", (width, height), image, "raw", "CMYK", 0, 1))
            )
        return _with_channel_axis(np.array(resize(self._wrap(image))))

    def _convert(self, image: Any, channels: int) -> ImageArray:
        return _with_channel_axis(np.array(image.convert(_MODES[channels])))

    def _wrap(self, image: ImageArray) -> Any:
        return self._module.fromarray(image.squeeze(2) if image.shape[2:] == (1,) else image)

    def _encode(self, image: ImageArray, kind: str, **options: Any) -> bytes:
        file = io.BytesIO()
        self._wrap(image).save(file, kind, **options)
        return file.getvalue()


def _with_channel_axis(image: NDArray[Any]) -> ImageArray:
    return image[..., np.newaxis] if image.ndim == 2 else image


_LIBRARIES: dict[str, Callable[[], Any]] = {
    "opencv": OpenCV,
    "pillow": Pillow,
    "simplejpeg": SimpleJpeg,
}


@functools.cache
def load_library(name: str) -> Any:
    """Return the codecs of `"simplejpeg"`, `"opencv"` or `"pillow"`; None if not installed."""
    try:
        return _LIBRARIES[name]()
    except ImportError:
        return None
