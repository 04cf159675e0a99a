"""Decoding of image files to arrays, shared by training, evaluation, release checks and serving.

An 8-bit image becomes (h, w, 3) uint8. A grey image of more bits becomes (h, w) uint16, with its levels stretched
from `[data] depth` bits to 16. EXIF orientation is applied, and transparent pixels are blended with white.
"""

from __future__ import annotations

import gzip
import importlib.util
import inspect
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedquilt import extras
from fedquilt.core import DataError
from fedquilt.data import inputs
from fedquilt.data.readers import base
from fedquilt.data.readers.base import READ_ERRORS, Bytes, ExampleReader, convert_labels, convert_read_errors, read_rows
from fedquilt.data.spec import DataSpec

SUFFIXES: Final = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
DEEP_MODES: Final = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # Pillow's names of grey levels beyond 8 bits
DEPTHS: Final = range(9, 17)
MAX_PIXELS: Final = 16_000_000  # of an image received over a network: 48 MB as RGB


def has_pillow() -> bool:
    return importlib.util.find_spec("PIL") is not None


def import_pillow() -> Any:
    try:
        from PIL import Image

        return Image
    except ImportError:
        command = extras.installation_command("images")
        raise DataError(f"image files need Pillow, which is not installed: {command}") from None


def read_image(source: Path | bytes, size: int = 0, depth: int = 0) -> np.ndarray:
    """Return the pixels of an image, resized if `size` is given.

    Args:
        source: A file, or the bytes of a PNG, JPEG, WebP or TIFF file of at most MAX_PIXELS pixels.
        size: Side of the result in pixels, or 0 to keep the image's own size.
        depth: Bits of a grey level, 9 to 16, or 0 for 8-bit images.

    Returns:
        Pixels, (h, w, 3) uint8, or (h, w) uint16 with a depth.

    Raises:
        DataError: If the image is damaged, too large, of another format, or has deeper levels than `depth`.
    """
    Image = import_pillow()
    name = f"the image {source}" if isinstance(source, Path) else "the image"
    try:
        with _open_image(Image, source) as image:
            if isinstance(source, bytes) and image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError
            pixels = pixels_from_image(image, name, depth)
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        size_problem = f"more than {MAX_PIXELS / 1e6:.0f} million pixels: send a smaller image"
        raise DataError(f"cannot read {name}: {size_problem if isinstance(source, bytes) else error}") from None
    except Image.UnidentifiedImageError as error:
        problem = "not a PNG, JPEG, WebP or TIFF file" if isinstance(source, bytes) else str(error)
        raise DataError(f"cannot read {name}: {problem}") from None
    except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error, ... by the kind of damage
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(f"cannot read {name}: {reason or type(error).__name__}") from None
    return inputs.resize_images(pixels[None], size)[0] if size else pixels


def pixels_from_image(image: Any, name: str, depth: int = 0, *, keep_grey: bool = False) -> np.ndarray:
    """Return a Pillow image's pixels as `read_image` does. With `keep_grey`, 8-bit grey stays (h, w)."""
    from PIL import ImageOps

    _require_supported_mode(image, name)
    image = ImageOps.exif_transpose(image)
    if image.mode in DEEP_MODES:
        return _scale_grey_levels(np.asarray(image), name, depth)
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        image = import_pillow().alpha_composite(import_pillow().new("RGBA", image.size, "white"), colours)
    if depth:
        return np.asarray(image.convert("L"), np.uint16) * np.uint16(257)  # 255 becomes 65535
    if keep_grey and image.mode == "L":
        return np.asarray(image)
    return np.asarray(image.convert("RGB"))


def measure_sizes(files: Sequence[Path]) -> list[tuple[int, int]]:  # (width, height) of each image
    sizes = []
    for file in files:
        with _open_file(file) as image:
            sizes.append(image.size)
    return sizes


def require_supported_files(files: Sequence[Path]) -> None:
    for file in files:
        with _open_file(file) as image:
            _require_supported_mode(image, f"the image {file}")


def measure_grey_depth(files: Sequence[Path], sample: int = 64) -> int:
    """Return the used bits of grey levels, 9 to 16, or 0 if all images have 8 bits.

    A 12-bit camera uses 12 bits of a 16-bit PNG. At least `sample` images, evenly spread over `files`, are decoded.
    """
    depth = 0
    for file in files[:: max(1, len(files) // sample)]:
        with _open_file(file) as image:
            if image.mode in DEEP_MODES:
                bits = int(np.asarray(image).max(initial=0)).bit_length()
                depth = max(depth, DEPTHS[0], min(bits, DEPTHS[-1]))
    return depth


def _open_image(Image: Any, source: Path | bytes) -> Any:
    if isinstance(source, Path):
        return Image.open(source)
    return Image.open(io.BytesIO(source), formats=("PNG", "JPEG", "WEBP", "TIFF"))


@contextmanager
def _open_file(file: Path) -> Iterator[Any]:
    Image = import_pillow()
    try:
        with _open_image(Image, file) as image:
            yield image
    except (OSError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read the image {file}: {reason}; remove or replace the file") from None


def _require_supported_mode(image: Any, name: str) -> None:
    if image.format == "TIFF" and getattr(image, "n_frames", 1) > 1:
        raise DataError(f"{name} has {image.n_frames} pages: save each page as a file")
    if image.mode == "F":
        raise DataError(f"{name} has floating-point levels: save it as PNG with 8 or 16 bits, or as an array in .npz")
    if image.mode == "I" and image.format == "TIFF":
        raise DataError(f"{name} has 32-bit levels: save it with 8 or 16 bits")


def _scale_grey_levels(levels: np.ndarray, name: str, depth: int) -> np.ndarray:
    low, high = int(levels.min(initial=0)), int(levels.max(initial=0))
    if low < 0 or high > 65535:
        raise DataError(f"{name} has grey levels from {low} to {high}: save it with 8 or 16 bits")
    needed_depth = max(DEPTHS[0], high.bit_length())
    if not depth:
        raise DataError(f"{name} has grey levels of more than 8 bits: set [data] depth = {needed_depth}")
    max_level = 2**depth - 1
    if high > max_level:
        raise DataError(
            f"{name} has level {high}, above the {max_level} of [data] depth = {depth}: set depth = {needed_depth}"
        )
    return np.rint(levels.astype(np.float32) * np.float32(65535 / max_level)).astype(np.uint16)


IDX_IMAGES = re.compile(r"(.*)images([-.])idx3-ubyte(\.gz)?$")


def open_idx(path: Path, spec: DataSpec) -> ExampleReader:
    """Return a reader of an IDX image file with its labels, or raise DataError.

    In a folder, the name of the split selects the file.
    """
    if path.is_dir():
        name_parts = ("t10k", "test") if spec.split == "test" else (spec.split,)
        all_paths = find_idx_images(path)
        images_paths = [file for file in all_paths if any(part in file.name for part in name_parts)]
        if spec.split == "train" and len(all_paths) == 1:
            images_paths = all_paths
        if len(images_paths) != 1:
            available = ", ".join(file.name for file in all_paths) or "none"
            problem = f"{len(images_paths)} IDX image files for split {spec.split!r} (files: {available})"
            raise DataError(f"{path} has {problem}: set [data] path to one of them")
        path = images_paths[0]
    match = IDX_IMAGES.match(path.name)
    if match is None:
        raise DataError(f"{path} has no name of an IDX image file: call it train-images-idx3-ubyte or similar (.gz)")
    labels_path = path.with_name(f"{match[1]}labels{match[2]}idx1-ubyte{match[3] or ''}")
    if not labels_path.is_file():
        raise DataError(f"{path} has no labels: put {labels_path.name} in the same folder")
    with convert_read_errors(labels_path), _open_stream(labels_path) as stream:
        (count,) = _read_idx_header(stream, labels_path, 1)
        labels = read_rows(stream, (count,), np.dtype(np.uint8), np.arange(count))
    with convert_read_errors(path), _open_stream(path) as stream:
        shape = _read_idx_header(stream, path, 3)
    if shape[0] != count:
        raise DataError(f"{path} has {shape[0]} images, but {labels_path.name} {count} labels: download both again")

    def take(rows: np.ndarray) -> np.ndarray:
        with convert_read_errors(path), _open_stream(path) as stream:
            return read_rows(stream, _read_idx_header(stream, path, 3), np.dtype(np.uint8), rows)

    return ExampleReader(convert_labels(labels, labels_path), take, shape[1:], np.dtype(np.uint8))


def find_idx_images(path: Path) -> list[Path]:
    files_by_name: dict[str, Path] = {}
    for folder in (path, path / "raw"):
        for file in sorted(folder.glob("*")) if folder.is_dir() else ():
            if IDX_IMAGES.match(file.name):
                files_by_name.setdefault(file.name.removesuffix(".gz"), file)
    return list(files_by_name.values())


def _read_idx_header(stream: Bytes, path: Path, dimensions: int) -> tuple[int, ...]:
    # Two zero bytes, the type (8 is unsigned byte), the rank, then the sizes as big-endian uint32.
    head = stream.read(4 * (1 + dimensions))
    if len(head) < 4 * (1 + dimensions) or head[:4] != bytes((0, 0, 8, dimensions)):
        raise DataError(f"{path} is not an IDX file of bytes with {dimensions} dimensions: download it again")
    return tuple(int(size) for size in np.frombuffer(head, ">u4")[1:])


def _open_stream(path: Path) -> Bytes:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def open_folder(path: Path, spec: DataSpec) -> ExampleReader:
    files, labels, owner = base.find_files_by_class(path, spec, SUFFIXES, "images")
    reader = _make_image_reader(labels, lambda row: read_image(files[row], spec.size, spec.depth), path)
    return replace(reader, owner=owner)


def open_torchvision(path: Path, spec: DataSpec) -> ExampleReader:
    from fedquilt.host.torchvision_compat import import_torchvision

    import_torchvision()
    from torchvision import datasets

    dataset_class = getattr(datasets, spec.dataset, None)
    if not isinstance(dataset_class, type):
        raise DataError(f"torchvision has no data set {spec.dataset!r}: set [data] dataset, such as MNIST or CIFAR10")
    parameters = inspect.signature(dataset_class).parameters
    options: dict[str, Any] = {"train": spec.split == "train"} if "train" in parameters else {"split": spec.split}
    if "download" in parameters:
        options["download"] = spec.download
    try:
        dataset = dataset_class(str(path), **options)
    except (RuntimeError, *READ_ERRORS) as error:
        problem = (str(error).splitlines() or [type(error).__name__])[0].rstrip(":")
        fix = f"check the network, or copy its files to {path}" if spec.download else "set [data] download = true"
        raise DataError(f"{spec.dataset} in {path}: {problem}: {fix}") from None
    labels = next((getattr(dataset, name) for name in ("targets", "labels", "_labels") if hasattr(dataset, name)), None)
    if labels is None:
        raise DataError(f"torchvision's {spec.dataset} has no list of labels: save it as a folder of images by class")

    def read_pixels(row: int) -> np.ndarray:
        pixels = pixels_from_image(dataset[row][0], f"{spec.dataset}, image {row}", spec.depth, keep_grey=True)
        return inputs.resize_images(pixels[None], spec.size)[0] if spec.size else pixels

    return _make_image_reader(convert_labels(np.asarray(labels), path), read_pixels, path)


def _make_image_reader(y: np.ndarray, read_pixels: Callable[[int], np.ndarray], path: Path) -> ExampleReader:
    if not len(y):
        raise DataError(f"{path} has no images of this split: add some")
    first_image = read_pixels(0)
    return ExampleReader(y, lambda rows: _stack_images(path, read_pixels, rows), first_image.shape, first_image.dtype)


def _stack_images(path: Path, read_pixels: Callable[[int], np.ndarray], rows: np.ndarray) -> np.ndarray:
    first_image = read_pixels(int(rows[0])) if len(rows) else np.zeros((0, 0), np.uint8)
    result = np.empty((len(rows), *first_image.shape), first_image.dtype)
    for index, row in enumerate(rows):
        pixels = read_pixels(int(row))
        if pixels.shape != first_image.shape:
            sizes = f"{pixels.shape[:2]} and {first_image.shape[:2]}"
            raise DataError(f"{path} has images of different sizes ({sizes} pixels): set [data] size")
        result[index] = pixels
    return result
