"""Documentation: examples of the compiled module run, and public names explain themselves."""

from __future__ import annotations

import doctest
import inspect

import pytest

import kvferry
from kvferry import _core

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Raise this with every example that is added; it shows that the walk below still finds them.
LEAST_EXAMPLES = 53


def compiled():
    """Yield (dotted name, object) of every class, member and function of the module."""
    for name, value in vars(_core).items():
        if name.startswith("_") or inspect.ismodule(value):
            continue
        yield name, value
        if inspect.isclass(value):
            for member_name, member in vars(value).items():
                if not member_name.startswith("_"):
                    yield f"{name}.{member_name}", member


def examples():
    parser = doctest.DocTestParser()
    for name, value in compiled():
        test = parser.get_doctest(inspect.getdoc(value) or "", {}, name, None, None)
        if test.examples:
            yield test


@pytest.mark.parametrize("test", list(examples()), ids=lambda test: test.name)
def test_examples_of_the_compiled_module_run(test):
    report = []
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
    assert result.failed == 0, "".join(report)
    assert result.attempted == len(test.examples)


def test_there_are_examples():
    found = list(examples())
    assert {"KVCache", "Route", "TensorSlot.shape"} <= {test.name for test in found}
    assert sum(len(test.examples) for test in found) >= LEAST_EXAMPLES


@pytest.mark.parametrize("name", kvferry.__all__)
def test_public_names_explain_themselves(name):
    value = getattr(kvferry, name)
    documentation = inspect.getdoc(value)
    assert documentation and len(documentation.split()) >= 3
    # msgspec and object docstrings that are merely inherited say nothing of this class.
    assert inspect.ismodule(value) or value.__doc__


@pytest.mark.parametrize("name", kvferry.errors.__all__)
def test_errors_explain_themselves(name):
    assert getattr(kvferry.errors, name).__dict__.get("__doc__")


@pytest.mark.parametrize(
    ("name", "value"), [pair for pair in compiled() if "." in pair[0]], ids=lambda value: str(value)
)
def test_methods_of_public_compiled_classes_explain_themselves(name, value):
    owner = getattr(_core, name.split(".")[0])
    explained = inspect.getdoc(value) or ""
    # Plain attributes may be described by their class instead.
    assert explained or name.split(".")[1] in (inspect.getdoc(owner) or "")


@pytest.mark.parametrize("name", kvferry.__all__)
def test_public_names_are_unique_objects(name):
    assert hasattr(kvferry, name)
