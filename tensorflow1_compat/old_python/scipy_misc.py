"""Replaces the image functions that `scipy.misc` had until SciPy 1.3, with Pillow and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["bytescale", "derivative", "fromimage", "imread", "imresize", "imrotate", "imsave", "imshow", "toimage"]

# Their names in Pillow.
_RESAMPLING = {name: name.upper() for name in ("nearest", "lanczos", "bilinear", "bicubic")}
_RESAMPLING["cubic"] = "BICUBIC"


def bytescale(data: Any, cmin: Any = None, cmax: Any = None, high: int = 255, low: int = 0) -> np.ndarray:
    """Scales values linearly to uint8, so that `cmin` becomes `low` and `cmax` becomes `high`.

    By default `cmin` and `cmax` are the smallest and the largest value.

    Raises:
      ValueError: 0 <= low <= high <= 255 does not hold, or `cmax` is below `cmin`.
    """
    data = np.asarray(data)
    if data.dtype == np.uint8:
        return data
    if not 0 <= low <= high <= 255:
        raise ValueError(f"bytescale: expected 0 <= low <= high <= 255; got low={low}, high={high}.")
    cmin = data.min() if cmin is None else cmin
    cmax = data.max() if cmax is None else cmax
    if cmax < cmin:
        raise ValueError(f"bytescale: cmax is below cmin; got cmin={cmin}, cmax={cmax}.")
    span = float(cmax - cmin) or 1.0
    scaled = (data - cmin) * ((high - low) / span) + low
    return (scaled.clip(low, high) + 0.5).astype(np.uint8)


def toimage(
    arr: Any,
    high: int = 255,
    low: int = 0,
    cmin: Any = None,
    cmax: Any = None,
    pal: Any = None,
    mode: str | None = None,
    channel_axis: int | None = None,
) -> Any:
    """Makes a Pillow image of an array: grey for 2 dimensions, colour for 3; scales values as `bytescale` does.

    For the modes "YCbCr" and "CMYK", colours are in this mode already.
    """
    from PIL import Image

    data = np.asarray(arr)
    if np.iscomplexobj(data):
        raise ValueError("toimage: expected real numbers; got complex ones.")
    if data.ndim == 2:
        if mode == "F":
            return Image.fromarray(data.astype(np.float32))
        if mode == "I":
            data = data * 1.0  # differences of small integers overflow
            cmin, cmax = data.min() if cmin is None else cmin, data.max() if cmax is None else cmax
            data = (data - cmin) * ((high - low) / (float(cmax - cmin) or 1.0)) + low
            return Image.fromarray(data.astype(np.int32))
        if mode == "1":
            return Image.fromarray((bytescale(data, cmin, cmax, high, low) > high // 2).astype(np.uint8) * 255).convert(
                "1"
            )
        image = Image.fromarray(bytescale(data, cmin, cmax, high, low))
        if pal is not None:
            image.putpalette(np.asarray(pal, np.uint8).tobytes())
        return image if mode in (None, "L", "P") else image.convert(mode)
    axes = [axis for axis in range(data.ndim) if data.shape[axis] in (3, 4)] if data.ndim == 3 else []
    if not axes:
        raise ValueError(f"toimage: expected 2 dimensions, or 3 of which one has 3 or 4 entries; got {data.shape}.")
    axis = channel_axis if channel_axis is not None else (2 if 2 in axes else axes[0])
    pixels = np.moveaxis(bytescale(data, cmin, cmax, high, low), axis, 2)
    given = mode if mode in ("YCbCr", "CMYK") else "RGB" if pixels.shape[2] == 3 else "RGBA"
    image = Image.frombytes(given, (pixels.shape[1], pixels.shape[0]), pixels.tobytes())
    return image if mode in (None, image.mode) else image.convert(mode)


def fromimage(im: Any, flatten: bool = False, mode: str | None = None) -> np.ndarray:
    """Returns the pixels of a Pillow image; with `flatten`, as grey values in float32."""
    if mode is not None and mode != im.mode:
        im = im.convert(mode)
    elif im.mode == "P":
        im = im.convert("RGBA" if "transparency" in im.info else "RGB")
    if flatten:
        return np.array(im.convert("F"))
    return np.array(im.convert("L") if im.mode == "1" else im)


def imread(name: Any, flatten: bool = False, mode: str | None = None) -> np.ndarray:
    """Reads an image file; returns its pixels."""
    from PIL import Image

    with Image.open(name) as image:
        return fromimage(image, flatten, mode)


def imsave(name: Any, arr: Any, format: str | None = None) -> None:
    """Writes an array as an image file; scales values as `toimage` does."""
    toimage(arr, channel_axis=2 if np.ndim(arr) == 3 else None).save(name, format)


def imresize(arr: Any, size: Any, interp: str = "bilinear", mode: str | None = None) -> np.ndarray:
    """Resizes an image; returns uint8.

    Args:
      arr: pixels of the image.
      size: percentage (int), factor (float), or (height, width).
      interp: "nearest", "lanczos", "bilinear", "bicubic" or "cubic".
      mode: Pillow mode for the resizing.
    """
    from PIL import Image

    image = toimage(arr, mode=mode)
    if isinstance(size, (int, np.integer)):
        shape = tuple(int(length * (size / 100.0)) for length in image.size)
    elif isinstance(size, (float, np.floating)):
        shape = tuple((np.array(image.size) * size).astype(int).tolist())
    else:
        shape = (int(size[1]), int(size[0]))
    return fromimage(image.resize(shape, resample=getattr(Image, _RESAMPLING[interp])))


def imrotate(arr: Any, angle: float, interp: str = "bilinear") -> np.ndarray:
    """Rotates an image counter-clockwise by `angle` degrees."""
    from PIL import Image

    # Pillow rotates with only three of these filters.
    resampling = {"lanczos": "BICUBIC"}.get(interp, _RESAMPLING[interp])
    return fromimage(toimage(arr).rotate(angle, resample=getattr(Image, resampling)))


def imshow(arr: Any) -> None:
    """Shows an image in the image viewer of the system."""
    toimage(arr).show()


def derivative(func: Any, x0: float, dx: float = 1.0, n: int = 1, args: tuple = (), order: int = 3) -> float:
    """Returns the n-th derivative of a function at `x0`, by central differences over `order` points `dx` apart."""
    if order < n + 1 or order % 2 == 0:
        raise ValueError(f"derivative: expected an odd order above n={n}; got order={order}.")
    points = np.arange(order) - order // 2
    powers = np.vander(points, increasing=True).T.astype(float)
    wanted = np.zeros(order)
    wanted[n] = float(np.prod(np.arange(1, n + 1)))
    weights = np.linalg.solve(powers, wanted)
    return sum(w * func(x0 + p * dx, *args) for w, p in zip(weights, points)) / dx**n
