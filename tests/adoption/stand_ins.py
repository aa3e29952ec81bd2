"""A pytest plugin: stand-ins for packages that a project imports and this environment lacks.

ADOPTION_STAND_INS names them (``ray,loguru``). One that is installed is used as it is. What tests call is implemented
below (ray, cloudpickle, parameterized, torchdata); any other attribute of a stand-in is ``Anything``: it can be called,
subclassed and indexed, and computes nothing. The outcomes of the tests and the stand-ins used go to ADOPTION_OUTCOMES.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import io
import json
import os
import pickle
import re
import sys
import types


class _Kind(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(name)


def _named(name):
    """A class for a name in CamelCase, an instance for any other."""
    return _Kind(name, (Anything,), {}) if name[0].isupper() and not name.isupper() else Anything()


class Anything(metaclass=_Kind):
    """Any class, function or value of a stand-in. As a decorator it returns the function unchanged."""

    def __new__(cls, *args, **kwargs):
        if len(args) == 1 and not kwargs and inspect.isfunction(args[0]):
            return args[0]
        return super().__new__(cls)

    def __init__(self, *args, **kwargs):
        pass

    def __init_subclass__(cls, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(name)

    def __or__(self, other):
        return self

    __ror__ = __add__ = __sub__ = __mul__ = __or__

    def __lt__(self, other):
        return False

    __gt__ = __lt__

    def __class_getitem__(cls, item):
        return cls

    def __getitem__(self, item):
        return self

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _named(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names):
        self.names = names

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Module(spec.name)
        module.__version__ = "0.0"
        return module

    def exec_module(self, module):
        vars(module).update(_WRITTEN.get(module.__name__, dict)())


# --- ray: actors in this process. What is put is pickled, as in ray ---


class ObjectRef:
    def __init__(self, value):
        self._bytes = _dumps(value)

    def __class_getitem__(cls, item):
        return cls

    def value(self):
        return _loads(self._bytes)


class _Method:
    def __init__(self, method):
        self._method = method

    def remote(self, *args, **kwargs):
        args = [arg.value() if isinstance(arg, ObjectRef) else arg for arg in args]
        return ObjectRef(self._method(*args, **kwargs))


class _Actor:
    def __init__(self, value):
        self._value = value

    def __getattr__(self, name):
        return _Method(getattr(self._value, name))


class _ActorClass:
    def __init__(self, cls, name=None):
        self._class, self._name = cls, name

    def options(self, name=None, **_):
        return _ActorClass(self._class, name)

    def remote(self, *args, **kwargs):
        actor = _Actor(self._class(*args, **kwargs))
        if self._name:
            _ray.actors[self._name] = actor
        return actor


class _Ray:
    def __init__(self):
        self.actors, self.started = {}, False

    def init(self, *_, **__):
        self.started = True

    def shutdown(self):
        self.actors, self.started = {}, False

    def get_actor(self, name, *_, **__):
        if name not in self.actors:
            raise ValueError(f"no actor is called {name}")
        return self.actors[name]

    def names(self):
        def get(refs):
            return [ref.value() for ref in refs] if isinstance(refs, (list, tuple)) else refs.value()

        def remote(*args, **_):
            if not args:
                return remote
            return _Method(args[0]) if inspect.isfunction(args[0]) else _ActorClass(args[0])

        return {
            "ObjectRef": ObjectRef,
            "put": ObjectRef,
            "get": get,
            "remote": remote,
            "init": self.init,
            "shutdown": self.shutdown,
            "is_initialized": lambda: self.started,
            "get_actor": self.get_actor,
            "kill": lambda actor, *_, **__: self.actors.clear(),
        }


_ray = _Ray()

# --- cloudpickle: functions and local classes by their index in _functions, all else pickled ---

_functions = []


class _Pickler(pickle.Pickler):
    def persistent_id(self, value):
        if inspect.isfunction(value) or (inspect.isclass(value) and "<locals>" in value.__qualname__):
            _functions.append(value)
            return len(_functions) - 1
        return None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, number):
        return _functions[number]


def _dumps(value, *_, **__):
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _loads(data):
    return _Unpickler(io.BytesIO(data)).load()


# --- parameterized: a method per case, in the class that is being defined ---


def _expand(cases, *_, **__):
    def make(function):
        place = sys._getframe(1).f_locals
        for number, case in enumerate(cases):
            case = case if isinstance(case, (tuple, list)) else (case,)
            suffix = f"_{case[0]}" if case and isinstance(case[0], str) else ""

            @functools.wraps(function)
            def test(self, case=case):
                return function(self, *case)

            del test.__wrapped__  # pytest would take the arguments for fixtures
            place[f"{function.__name__}_{number}{suffix}"] = test
        return None

    return make


# --- torchdata: a DataLoader whose state is the number of batches yielded ---


def _stateful_dataloader():
    import torch.utils.data

    class StatefulDataLoader(torch.utils.data.DataLoader):
        given, first = 0, 0

        def __iter__(self):
            first, self.first = self.first, 0
            self.given = first
            for number, batch in enumerate(super().__iter__()):
                if number >= first:
                    self.given += 1
                    yield batch

        def state_dict(self):
            return {"given": self.given}

        def load_state_dict(self, state):
            self.first = state["given"]

    return {"StatefulDataLoader": StatefulDataLoader}


_WRITTEN = {
    "torchdata.stateful_dataloader": _stateful_dataloader,
    "ray": _ray.names,
    "cloudpickle": lambda: {"dumps": _dumps, "loads": _loads},
    "parameterized": lambda: {"parameterized": type("parameterized", (), {"expand": staticmethod(_expand)})},
}


# --- the outcome of each test, for run.py ---

_outcomes = {}


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid] = {"outcome": report.outcome, "message": _message(report)}


def pytest_collectreport(report):
    if report.failed:
        _outcomes[report.nodeid] = {"outcome": "failed", "message": _message(report)}


def pytest_sessionfinish():
    if "ADOPTION_OUTCOMES" in os.environ:
        with open(os.environ["ADOPTION_OUTCOMES"], "w") as file:
            json.dump({"outcomes": _outcomes, "stand_ins": _absent}, file)


def _message(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr or "")
    return " ".join(text.split())[:200]


def missing(names):
    """Those of ``names`` that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


if "pydantic" in os.environ.get("ADOPTION_FIXES", "") and sys.version_info < (3, 12):  # pydantic refuses typing's
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict


class _Words:
    """A tokenizer that numbers words and signs as they come, for tests that would download one."""

    pad_token_id, pad_token = 0, "<pad>"

    def __init__(self):
        self.numbers = {}

    def add_special_tokens(self, _):
        return 0

    def encode(self, text):
        return [self.numbers.setdefault(word, 1 + len(self.numbers)) for word in re.findall(r"\w+|[^\w\s]", text)]


if "tokenizer" in os.environ.get("ADOPTION_FIXES", ""):
    import transformers

    transformers.AutoTokenizer.from_pretrained = lambda *_, **__: _Words()


def _version(name, known=importlib.metadata.version):
    try:
        return known(name)
    except importlib.metadata.PackageNotFoundError:
        if name.replace("-", "_") in _versions:
            return _versions[name.replace("-", "_")]
        raise


_versions = dict(pair.split("=") for pair in os.environ.get("ADOPTION_VERSIONS", "").split(",") if pair)
importlib.metadata.version = _version

_absent = missing([name for name in os.environ.get("ADOPTION_STAND_INS", "").split(",") if name])
if _absent:
    sys.meta_path.append(_Finder(_absent))
