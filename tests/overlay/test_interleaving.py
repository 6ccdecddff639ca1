"""The interleaved execution of a layer over a stock module, on small modules made up for it."""

import importlib.util
import inspect
import pickle
import sys
import textwrap
import traceback
import types

import pytest

from megatron.overlay import OverlayError, upstream_of
from megatron.overlay.definitions import Source, digests
from megatron.overlay.interleaving import InterleavingLoader, Layered

NAME = "overlay_test_module"
HEADER = "from megatron.overlay import upstream_of\nupstream = upstream_of(__name__)\n"


@pytest.fixture
def load(tmp_path):
    """Runs ``layers`` over ``stock`` as module NAME."""

    def run(stock: str, *layers: str) -> types.ModuleType:
        sources = []
        for name, text in [("stock", stock), *((f"layer{i}", t) for i, t in enumerate(layers))]:
            path = tmp_path / f"{name}.py"
            path.write_text(textwrap.dedent(text))
            sources.append(Source.read(NAME, path))
        loader = InterleavingLoader(Layered(sources[0], sources[1:]))
        spec = importlib.util.spec_from_file_location(NAME, tmp_path / "stock.py", loader=loader)
        assert spec is not None
        module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[NAME]
            raise
        return module

    yield run
    sys.modules.pop(NAME, None)


CLASSES = """
class Base:
    limit = 1
    def __init__(self, x):
        self.x = x
    def value(self):
        return self.x
    @staticmethod
    def unit():
        return "stock"
    @classmethod
    def make(cls):
        return cls(self_made)
    @property
    def twice(self):
        return 2 * self.value()

self_made = 5

class Child(Base):
    def __init__(self, x):
        super(Child, self).__init__(x)

def build(x, kind=Base):
    return kind(x)
"""


def test_stock_classes_below_inherit_from_the_layers(load):
    module = load(
        CLASSES,
        HEADER + """
class Base(upstream.Base):
    limit = 2
    def value(self):
        return super().value() + 100
    @staticmethod
    def unit():
        return "layer of " + upstream.Base.unit()
""",
    )
    upstream = upstream_of(NAME).Base
    assert module.Child.__mro__ == (module.Child, module.Base, upstream, object)
    assert module.Child(1).value() == 101
    assert module.Child(1).twice == 202
    assert module.Child.make().value() == 105
    assert (module.Child.limit, upstream.limit) == (2, 1)
    assert module.Child.unit() == "layer of stock"
    assert type(module.build(1)) is module.Base, "a default argument further down is the layer's"
    assert (module.Base.__qualname__, upstream.__qualname__) == ("Base", "upstream.Base")
    assert module.upstream is upstream_of(NAME)


def test_two_argument_super_in_a_layered_stock_class(load):
    """By name it would find the layer's class, and call itself for ever."""
    module = load(
        CLASSES,
        HEADER + """
class Child(upstream.Child):
    def __init__(self, x):
        super().__init__(x + 1)
""",
    )
    assert module.Child(1).x == 2


FUNCTIONS = """
def plain(x):
    return x + 1

def caller(x):
    return plain(x)

def decorate(function):
    return lambda x: function(x) * 10

@decorate
def decorated(x):
    return plain(x)

TABLE = {"plain": plain}

def with_default(x, function=plain):
    return function(x)
"""


def test_stock_code_below_gets_the_layers_function(load):
    module = load(
        FUNCTIONS,
        HEADER + """
def plain(x):
    return upstream.plain(x) + 1000

def decorate(function):
    return lambda x: -upstream.decorate(function)(x)

def decorated(x):
    return "layer", upstream.decorated(x)
""",
    )
    assert module.caller(1) == 1002
    assert module.TABLE["plain"] is module.plain
    assert module.with_default(1) == 1002
    assert module.decorated(1) == ("layer", -10020), "stock's own decoration stays on stock's"
    assert upstream_of(NAME).plain(1) == 2


def test_what_only_the_layer_defines_is_run_where_it_stands(load):
    module = load(
        FUNCTIONS,
        HEADER + """
import math
OFFSET = math.floor(1000.5)

def plain(x, offset=OFFSET):
    return upstream.plain(x) + offset + later()

AT_ONCE = plain

def later():
    return 7
""",
    )
    assert module.caller(1) == 1009
    assert module.AT_ONCE is module.plain


def test_constants(load):
    module = load(
        "A: int = 1\nB = C = 2\nNAMES = ['x']\ndef total():\n    return A + B + C\nAT_IMPORT = A + B\n",
        HEADER + "A = upstream.A + 10\nB = upstream.B + 100\nNAMES = upstream.NAMES + ['y']\n",
    )
    assert module.total() == 11 + 102 + 2
    assert module.AT_IMPORT == 113
    assert module.NAMES == ["x", "y"]
    assert module.__annotations__ == {"A": int}


CONDITIONAL = """
try:
    import a_package_that_is_not_there
    HAVE = True
    def probe():
        return "have"
except ImportError:
    HAVE = False
    def probe():
        return "have not"
if HAVE:
    class Fast:
        pass
if not HAVE:
    class Slow:
        def speed(self):
            return 1
    def both():
        return Slow().speed()
else:
    Slow = both = None
"""


def test_definitions_inside_try_and_if(load):
    module = load(
        CONDITIONAL,
        HEADER + """
def probe():
    return "layer: " + upstream.probe()
if HAVE:
    class Fast(upstream.Fast):
        pass
if not HAVE:
    class Slow(upstream.Slow):
        def speed(self):
            return super().speed() + 1
    def both():
        return upstream.both() + 10
""",
    )
    assert module.probe() == "layer: have not"
    assert not hasattr(module, "Fast")
    assert module.both() == 12


def test_a_layers_condition_that_does_not_hold_leaves_stocks(load):
    module = load(FUNCTIONS, HEADER + "if False:\n    def plain(x):\n        return None\n")
    assert module.plain is upstream_of(NAME).plain
    assert module.caller(1) == 2
    assert pickle.loads(pickle.dumps(module.plain)) is module.plain


def test_asking_for_what_stock_defines_under_another_condition(load):
    with pytest.raises(AttributeError, match=r"upstream\.Fast does not exist .*condition"):
        load(CONDITIONAL, HEADER + "class Fast(upstream.Fast):\n    pass\n")


def test_one_statement_of_the_layer_over_two_of_stock(load):
    with pytest.raises(AttributeError, match=r"upstream\.caller does not exist \(yet\)"):
        load(
            FUNCTIONS,
            HEADER + """
if True:
    def plain(x):
        return upstream.plain(x)
    caller = upstream.caller
""",
        )


def test_future_annotations_of_one_file_only(load):
    stock = "def f(x: int):\n    return x\ndef g(x: int):\n    return x\n"
    layer = HEADER + "def f(x: int):\n    return x\n"
    future = "from __future__ import annotations\n"
    module = load(stock, future + layer)
    assert (module.f.__annotations__, module.g.__annotations__) == ({"x": "int"}, {"x": int})
    assert upstream_of(NAME).f.__annotations__ == {"x": int}
    module = load('"""Stock."""\n' + future + stock, layer)
    assert (module.f.__annotations__, module.g.__annotations__) == ({"x": int}, {"x": "int"})
    assert module.__doc__ == "Stock."


def test_dataclass_fields_reach_stock_subclasses(load):
    module = load(
        """
        from __future__ import annotations
        from dataclasses import dataclass, fields

        @dataclass
        class Config:
            width: int = 1

        @dataclass
        class Wide(Config):
            depth: int = 2

        def names():
            return [field.name for field in fields(Wide)]
        """,
        "from dataclasses import dataclass\n" + HEADER + """
@dataclass
class Config(upstream.Config):
    height: int = 3
""",
    )
    assert module.names() == ["width", "height", "depth"]
    assert repr(module.Wide(height=9)) == "Wide(width=1, height=9, depth=2)"


def test_sources_and_tracebacks(load, tmp_path):
    layer = '''
class Base(upstream.Base):
    """The layer's."""
    def value(self):
        return super().value() / 0

class New:
    pass
'''
    module = load(CLASSES, HEADER + layer)
    upstream = upstream_of(NAME)
    assert inspect.getsource(module.Base).startswith('class Base(upstream.Base):\n    """The layer')
    assert inspect.getsource(upstream.Base).startswith("class Base:\n    limit = 1\n")
    assert inspect.getsource(upstream.Base.value) == "    def value(self):\n        return self.x\n"
    assert inspect.getsource(module.New) == "class New:\n    pass\n"
    assert inspect.getsource(module.Child).startswith("class Child(Base):\n")
    assert inspect.getsource(module.build).startswith("def build(x, kind=Base):\n")
    assert inspect.getfile(module.New) == str(tmp_path / "layer0.py")
    with pytest.raises(ZeroDivisionError) as caught:
        module.Child(1).twice
    frames = [(f.filename, f.line) for f in traceback.extract_tb(caught.tb)[1:]]
    assert frames == [
        (str(tmp_path / "stock.py"), "return 2 * self.value()"),
        (str(tmp_path / "layer0.py"), "return super().value() / 0"),
    ]


def test_pickle(load):
    module = load(
        CLASSES, HEADER + "class Base(upstream.Base):\n    pass\ndef build(x): return x\n"
    )
    upstream = upstream_of(NAME)
    for thing in (module.Base, module.Child, module.build, upstream.Base, upstream.build):
        assert pickle.loads(pickle.dumps(thing)) is thing
    assert type(pickle.loads(pickle.dumps(module.Child(3)))) is module.Child


def test_two_layers_of_one_module(load):
    module = load(
        CLASSES,
        HEADER + "def build(x):\n    return 'second', upstream.build(x)\n",
        HEADER + "class Base(upstream.Base):\n    limit = 3\n",
    )
    assert module.build(1)[1].limit == 3


@pytest.mark.parametrize(
    "second, message",
    [
        ("class Base(upstream.Base):\n    pass\n", "two layers claim Base of"),
        ("def helper():\n    return 2\n", "two layers claim helper of"),
        ("from os import path as helper\n", "imports helper, which .*layer0.py defines"),
    ],
)
def test_two_layers_with_one_name(load, second, message):
    first = "class Base(upstream.Base):\n    pass\ndef helper():\n    return 1\n"
    with pytest.raises(OverlayError, match=message):
        load(CLASSES, HEADER + first, HEADER + second)


@pytest.mark.parametrize(
    "stock, layer, message",
    [
        ("", "def a(): pass\ndef a(): pass\n", "two layers claim a: .*layer0.py defines it twice"),
        (
            "",
            "def b(): pass\ndef a(): pass\n",
            r"defines b, a in this order; .*stock.py defines a, b",
        ),
        ("", "x = upstream.gone\n", "does not define gone: the target is gone"),
        ("", "x = upstream.a\n", "uses upstream.a but does not define a"),
        ("from os import sep\n", "sep = 1\n", "stock.py imports sep, which .*layer0.py defines"),
        ("", "from os import sep as a\n", "layer0.py imports a, which .*stock.py defines"),
        ("from os import sep as s\n", "from os import path as s\n", "imports from elsewhere"),
    ],
)
def test_layers_that_cannot_run(load, stock, layer, message):
    with pytest.raises(OverlayError, match=message):
        load(stock + "def a(): pass\ndef b(): pass\n", HEADER + layer)


def test_imports_that_mean_the_same_do_not_clash(load):
    module = load(
        "import os.path\nfrom os import sep\ntry:\n    import json\nexcept ImportError:\n    json = None\ndef a(): pass\n",
        HEADER
        + "import os\nimport json\nfrom os import sep\ndef a():\n    return sep, json.dumps(1)\n",
    )
    assert module.a() == ("/", "1")


@pytest.mark.parametrize(
    "above", ["", "upstream = upstream_of(__name__)\n", "import sys\nTHREE = 3\n"]
)
def test_a_circular_import_never_finds_the_stock_definition(load, tmp_path, monkeypatch, above):
    """Whatever stands above the import; stock code that guards it with ImportError does not hide it."""
    (tmp_path / "wants_it.py").write_text(f"from {NAME} import plain\n")
    monkeypatch.syspath_prepend(tmp_path)
    layer = "from megatron.overlay import upstream_of\n" + above + "import wants_it\n"
    layer += "upstream = upstream_of(__name__)\ndef plain(x):\n    return None\n"
    with pytest.raises(
        OverlayError, match="layer0.py does not import: cannot import name 'plain'"
    ) as e:
        load(FUNCTIONS, layer)
    assert isinstance(e.value.__cause__, ImportError)
    assert "wants_it" not in sys.modules


def test_an_import_inside_the_function_is_the_way_out(load, tmp_path, monkeypatch):
    (tmp_path / "wants_it_too.py").write_text(f"from {NAME} import plain\n")
    monkeypatch.syspath_prepend(tmp_path)
    body = "def plain(x):\n    import wants_it_too\n    return wants_it_too.plain\n"
    module = load(FUNCTIONS, HEADER + body)
    assert module.caller(1) is module.plain


def test_stocks_own_import_errors_stay_import_errors(load):
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        load("def plain(x): pass\nimport not_there\n", HEADER + "def plain(x): pass\n")


@pytest.mark.parametrize(
    "change, symbols",
    [
        (("return self.x", "return self.x  # why"), set()),
        (("return self.x", '"""Doc."""\n        return  (self.x)'), set()),
        (("return self.x", "return self.x + 0"), {"Base.value"}),
        (("class Base:", "class Base(dict):"), {"Base"}),
        (('return "stock"', 'return "other"'), set()),
        (("limit = 1", "limit = 1.0"), {"Base.limit"}),
    ],
)
def test_the_digest_of_an_extended_class_is_of_what_the_layer_overrides(tmp_path, change, symbols):
    layer = tmp_path / "layer.py"
    layer.write_text("class Base(upstream.Base):\n    limit = 2\n    def value(self): pass\n")
    found = []
    for text in (CLASSES, CLASSES.replace(*change)):
        (tmp_path / "stock.py").write_text(text)
        stock = Source.read(NAME, tmp_path / "stock.py")
        found.append(digests("Base", stock, Source.read(NAME, layer)))
    assert found[0].keys() == {"Base", "Base.value", "Base.limit"}
    assert {symbol for symbol in found[0] if found[0][symbol] != found[1].get(symbol)} == symbols


@pytest.mark.parametrize("word", ["have", "have not"])
def test_the_digest_of_a_function_is_of_each_of_its_definitions(tmp_path, word):
    layer = tmp_path / "layer.py"
    layer.write_text("def probe(): pass\n")
    found = []
    for text in (CONDITIONAL, CONDITIONAL.replace(f'"{word}"', '"else"')):
        (tmp_path / "stock.py").write_text(text)
        stock = Source.read(NAME, tmp_path / "stock.py")
        found.append(digests("probe", stock, Source.read(NAME, layer)))
    assert found[0].keys() == {"probe"} and found[0] != found[1]
