"""Datasets of the images in a folder per class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import headrace as hr
from headrace.errors import DataLossError, NotFoundError
from headrace.sources.image_files import ImageFilesSource
from headrace.testing.conformance import check_source

pytest.importorskip("PIL")

FILES = {
    "b/2.png": 0,
    "b/1.jpg": 0,
    "a/deep/x.png": 1,
    "a/0.png": 1,
    "c c/é.gif.png": 2,
}


def image_bytes(name: str, height: int = 6) -> bytes:
    """Return an image file whose pixels are the first byte of its name."""
    image = np.full((height, 5, 3), ord(name[0]), np.uint8)
    return hr.io.encode_jpeg(image) if name.endswith("jpg") else hr.io.encode_png(image)


def write(folder: Path, name: str, data: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(FILES):
        write(tmp_path, name, image_bytes(name, 6 + number))
    for name in (".DS_Store", "README", "a/.hidden.png", ".git/x.png", "b/.thumbs/x.png"):
        write(tmp_path, name, b"no image")
    return tmp_path


def colors_and_labels(elements: Any) -> list[tuple[str, int]]:
    return [(chr(each["image"][0, 0, 0]), int(each["label"])) for each in elements]


ALL = [("a", 0), ("a", 0), ("b", 1), ("b", 1), ("c", 2)]


def test_images_are_read_class_by_class(folder: Path) -> None:
    dataset = hr.Dataset.from_image_folder(folder)
    elements = list(dataset)

    assert colors_and_labels(elements) == ALL
    assert [element["image"].shape for element in elements] == [
        (9, 5, 3), (8, 5, 3), (7, 5, 3), (6, 5, 3), (10, 5, 3),
    ]  # fmt: skip
    assert [set(element) for element in elements] == [{"image", "label"}] * 5
    assert {element["label"].dtype for element in elements} == {np.dtype(np.int64)}
    assert dataset.cardinality() == 5
    assert dataset.element_spec["image"].dtype == np.uint8


def test_source_conforms(folder: Path) -> None:
    source = ImageFilesSource.from_directory(folder, None)
    names = ["a/0.png", "a/deep/x.png", "b/1.jpg", "b/2.png", "c c/é.gif.png"]

    assert source.paths == tuple(f"{folder}/{name}" for name in names)
    labels = [0, 0, 1, 1, 2]
    check_source(
        source, [{"name": n, "label": np.int64(k)} for n, k in zip(names, labels, strict=True)]
    )


def test_classes_are_sorted_by_name(folder: Path) -> None:
    for name in ("b-2", "b 2", "a.2", "B"):  # characters before and after the slash
        write(folder, f"{name}/0.png", image_bytes("x"))

    source = ImageFilesSource.from_directory(folder, None)

    classes = list(dict.fromkeys(name.partition("/")[0] for name in source.names))
    assert classes == ["B", "a", "a.2", "b", "b 2", "b-2", "c c"]


def test_labels_follow_the_given_class_names(folder: Path) -> None:
    dataset = hr.Dataset.from_image_folder(str(folder), class_names=["c c", "b"])

    assert colors_and_labels(dataset) == [("c", 0), ("b", 1), ("b", 1)]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_of_one_size_can_be_batched(folder: Path, channels: int) -> None:
    dataset = hr.Dataset.from_image_folder(folder, (4, 7), channels=channels, num_parallel_calls=2)
    (batch,) = dataset.shuffle(100, seed=1).batch(5)

    assert batch["image"].shape == (5, 4, 7, channels)
    assert sorted(batch["label"].tolist()) == [0, 0, 1, 1, 2]


def test_files_by_url(folder: Path) -> None:
    system = fsspec.filesystem("memory")
    try:
        for name in FILES:
            system.pipe_file(f"/image-folder/{name}", (folder / name).read_bytes())
        system.pipe_file("/image-folder/README", b"no image")
        for url in ("memory://image-folder", "memory://image-folder/"):
            assert colors_and_labels(hr.Dataset.from_image_folder(url)) == ALL
        with pytest.raises(NotFoundError, match="memory://no-folder"):
            hr.Dataset.from_image_folder("memory://no-folder")
    finally:
        system.rm("/image-folder", recursive=True)
    assert colors_and_labels(hr.Dataset.from_image_folder(f"file://{folder}/")) == ALL


@pytest.mark.parametrize("num_parallel_calls", [None, 2])
def test_iterators_resume_at_any_element(folder: Path, num_parallel_calls: int | None) -> None:
    dataset = hr.Dataset.from_image_folder(folder, num_parallel_calls=num_parallel_calls).shuffle(
        5, seed=3, reshuffle_each_iteration=False
    )
    expected = colors_and_labels(dataset)
    for count in range(6):
        with iter(dataset) as iterator:
            for _ in range(count):
                next(iterator)
            state = iterator.get_state()
        with iter(dataset) as iterator:
            iterator.set_state(state)
            assert colors_and_labels(iterator) == expected[count:]


def test_shuffle_continues_after_a_file_that_is_no_image(folder: Path) -> None:
    write(folder, "a/broken.png", b"no image")
    dataset = hr.Dataset.from_image_folder(folder).shuffle(100, seed=1).map(lambda e: e["label"])

    found, failures = [], 0
    iterator = iter(dataset)
    while True:
        try:
            found.append(int(next(iterator)))
        except DataLossError:
            failures += 1
        except StopIteration:
            break
    assert (sorted(found), failures) == ([0, 0, 1, 1, 2], 1)


def test_shuffle_reads_the_files_in_its_order(folder: Path) -> None:
    plan = hr.Dataset.from_image_folder(folder).shuffle(100).explain().partition("as executed")[2]

    assert -1 < plan.find("Map") < plan.find("GatherIndices") < plan.find("Shuffle")


def test_file_that_is_no_image_fails_in_its_turn(folder: Path) -> None:
    write(folder, "b/1a.png", b"no image")
    write(folder, "c c/broken.jpg", image_bytes("x.jpg")[:-20])
    write(folder, "c c/empty.png", b"")
    iterator = iter(hr.Dataset.from_image_folder(folder))

    assert colors_and_labels(next(iterator) for _ in range(3)) == ALL[:3]
    with pytest.raises(DataLossError, match=r"b/1a\.png': the data is no JPEG, PNG.*b'no image'"):
        next(iterator)
    assert colors_and_labels([next(iterator)]) == ALL[3:4]
    with pytest.raises(DataLossError, match=r"c c/broken\.jpg': the JPEG image of .* is damaged"):
        next(iterator)
    with pytest.raises(DataLossError, match=r"c c/empty\.png': .*empty \(0 bytes\)"):
        next(iterator)
    assert colors_and_labels(iterator) == ALL[4:]


def test_files_of_other_kinds_are_ignored_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a/labels.csv", "b/Thumbs.db", "d/notes.txt"):
        write(folder, name, b"no image")
    write(folder, "b/3.PNG", image_bytes("b.png"))
    write(folder, "b/4", image_bytes("b.png"))
    dataset = hr.Dataset.from_image_folder(folder)
    assert colors_and_labels(dataset) == [*ALL[:2], *[("b", 1)] * 4, ALL[4]]
    assert "ignored 3 files whose names do not end like those of images" in caplog.text
    assert "such as 'a/labels.csv'" in caplog.text


def test_file_that_disappeared_is_an_error_with_its_path(folder: Path) -> None:
    dataset = hr.Dataset.from_image_folder(folder)
    (folder / "a/0.png").unlink()

    with pytest.raises(NotFoundError, match=r"No such file: '.*a/0\.png'"):
        next(iter(dataset))


def test_missing_directories_and_classes_are_errors(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "flat", "x.png", image_bytes("x"))

    for call, words in (
        (lambda: hr.Dataset.from_image_folder(tmp_path / "no"), r"No such file: '.*no'"),
        (lambda: hr.Dataset.from_image_folder(tmp_path / "empty"), r"DIRECTORY/CLASS/FILE"),
        (lambda: hr.Dataset.from_image_folder(tmp_path / "flat"), r"has no folders with files"),
        (
            lambda: hr.Dataset.from_image_folder(folder, class_names=["a", "z", "y"]),
            r"the class folders \['z', 'y'\] in '.*' do not exist",
        ),
    ):
        with pytest.raises(NotFoundError, match=words):
            call()  # type: ignore[no-untyped-call]


def test_wrong_arguments_are_errors(folder: Path) -> None:
    make = hr.Dataset.from_image_folder
    for arguments, error, words in (
        ({"class_names": "ab"}, TypeError, "`class_names` must be a list of strings"),
        ({"class_names": []}, ValueError, "`class_names` must be different names"),
        ({"class_names": ["a", "a"]}, ValueError, "`class_names` must be different names"),
        ({"size": 224}, TypeError, r"`size` must be a height and a width"),
        ({"channels": 2}, ValueError, "`channels` must be 0, 1, 3 or 4"),
    ):
        with pytest.raises(error, match=words):
            make(folder, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`directory` must be a single directory"):
        make([folder, folder])  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["distributed_epoch", "FILE", "DATA"])
def test_workers_share_the_files(folder: Path, policy: str) -> None:
    dataset = hr.Dataset.from_image_folder(folder, size=(4, 4))
    addresses = None if policy == "distributed_epoch" else ["localhost"] * 2
    mode = policy if addresses is None else hr.service.ShardingPolicy[policy]

    with hr.service.LocalCluster(2, processes=False, worker_addresses=addresses) as cluster:
        distributed = dataset.apply(hr.service.distribute(mode, cluster.target))
        assert sorted(colors_and_labels(distributed)) == ALL


def test_workers_read_the_files_in_order(folder: Path) -> None:
    dataset = hr.Dataset.from_image_folder(folder, size=(4, 4))

    with hr.service.LocalCluster(2, processes=False) as cluster:
        distributed = dataset.apply(
            hr.service.distribute("distributed_epoch", cluster.target, ordered=True)
        )
        assert colors_and_labels(distributed) == ALL
