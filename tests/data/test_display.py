"""Displays of datasets, iterators and servers run no user code, and HTML is escaped."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

import headrace as hr
from tests.execution.pipelines import PIPELINES

Dataset = hr.Dataset


def fail(x):
    raise AssertionError("a display calls no function")


def test_repr_names_what_is_known_without_running():
    assert repr(Dataset.range(3)).startswith("<Dataset FromSource element_spec=ArraySpec(")
    dataset = Dataset.range(3).map(fail).batch(2)
    assert repr(dataset) == "<Dataset Batch element_spec=unknown until read>"


def test_elements_of_different_dtypes_are_displayed():
    dataset = Dataset.range(3).concatenate(Dataset.from_tensor_slices([1.5]))
    assert repr(dataset) == "<Dataset Concatenate element_spec=not the same for all elements>"
    assert "not the same" in dataset._repr_html_()


def test_html_lists_steps_with_specs_and_locations():
    html = Dataset.range(3).map(fail).batch(2)._repr_html_()
    assert html.count("<li") == 3
    assert "test_display.py:" in html
    assert "Batch(size=2" in html
    assert "unknown until read" in html
    assert "iteration" not in html


def test_html_is_escaped():
    html = Dataset.range(3).map(lambda x: x).map(lambda x: fail(x))._repr_html_()
    assert "&lt;lambda&gt;" in html
    assert "<lambda>" not in html


class Outline(HTMLParser):
    """Checks that tags are closed in order, and collects texts and tags."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], set(), []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("name", PIPELINES)
def test_html_is_well_formed(name):
    outline = Outline(PIPELINES[name]()._repr_html_())
    assert outline.tags == {"div", "b", "ul", "li", "code"}
    assert outline.texts


def test_names_and_specs_are_texts_of_the_html():
    key = "<script>alert('&')</script>"
    dataset = Dataset.from_tensor_slices({key: [1, 2]}).map(lambda row: row, name="<i>")
    list(dataset.iterate(stats=True))
    outline = Outline(dataset._repr_html_())
    assert outline.tags == {"div", "b", "ul", "li", "code", "pre"}
    assert "<script>" in "".join(outline.texts)


def test_html_shows_the_last_statistics():
    dataset = Dataset.range(3).map(lambda x: x if x else -x)
    list(dataset.iterate(stats=True))
    html = dataset._repr_html_()
    assert "Last iteration" in html
    assert "elements" in html


def test_html_of_a_deep_plan_is_not_recursive():
    dataset = Dataset.range(3)
    for _ in range(2000):
        dataset = dataset.skip(0)
    assert dataset._repr_html_().count("<li") == 2001


def test_iterators_name_their_step_and_status():
    iterator = iter(Dataset.range(3).map(lambda x: x + 1).batch(2))
    assert repr(iterator) == "<DatasetIterator of batch, not started>"
    next(iterator)
    assert repr(iterator) == "<DatasetIterator of batch, running>"
    iterator.close()
    assert repr(iterator) == "<DatasetIterator of batch, ended>"


def test_servers_name_their_addresses_and_workers():
    with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
        dispatcher = cluster.dispatcher
        assert repr(dispatcher) == f"<DispatchServer at {cluster.target}, 2 workers>"
        assert repr(cluster) == (
            f"<LocalCluster at {cluster.target}, workers running: 2, as threads of this process>"
        )
        with hr.service.WorkerServer(
            hr.service.WorkerConfig(cluster.target.removeprefix("tcp://"))
        ) as worker:
            assert repr(worker).startswith(f"<WorkerServer at {worker.address}, dispatcher ")
    assert repr(dispatcher).endswith(", stopped>")
    assert repr(worker).endswith(", stopped>")
    assert repr(hr.service.DispatchServer(start=False)) == "<DispatchServer, not started>"
