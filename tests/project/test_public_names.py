"""What a stranger finds without reading the sources: help(), dir() and the types that an editor shows."""

import copy
import importlib
import importlib.util
import inspect
import pickle
import pydoc
import re
import sys
import types
import typing

import pytest
import torch
from helpers import fresh_process
from helpers.public_names import CONTRIB, HOSTS, NEEDS, PUBLIC, public_names

import packing_ops as po
import packing_ops.data
import packing_ops.parallel
from packing_ops._runtime.lazy import lazy_modules

CONSTANTS = {"packing_ops": ["FORK_ALIGNMENT"]}
LAZY = {"packing_ops.integrations.megatron": "megatron", "packing_ops.integrations.transformers": "transformers"}
# The types that depend on arguments, for which typing remembers overloads since Python 3.11.
DEPENDING = {
    "apply_rotary_qk",
    "attention",
    "causal_conv1d",
    "compute_prompt_boundaries",
    "compute_prompt_end_indices",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "gated_delta_rule",
    "mamba2_scan",
    "packed_alignment",
    "prefix_token_logps",
    "select_attention_backend",
    "token_budget_microbatches",
    "token_logps",
    "varlen_attention",
}


def ours(module):
    """{name: what packing_ops defines and the module shows}."""
    named = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name: v for name, v in named.items() if getattr(v, "__module__", "").startswith("packing_ops")}


def test_help_lists_every_function():
    page = pydoc.plain(pydoc.render_doc(po))
    listed = {line.strip().split("(")[0] for line in page.split("\nFUNCTIONS\n")[1].splitlines()}
    functions = {name for name, value in ours(po).items() if inspect.isfunction(value)}
    assert {"varlen_attention", "pack_sequences"} <= functions <= listed
    assert f"VERSION\n    {po.__version__}" in page


@pytest.mark.parametrize("module", [po, packing_ops.data], ids=lambda module: module.__name__)
def test_all_names_what_there_is(module):
    assert sorted(module.__all__) == sorted([*ours(module), *CONSTANTS.get(module.__name__, [])])


@pytest.mark.parametrize("name", LAZY)
def test_lazy_modules_list_their_names(name):
    pytest.importorskip(LAZY[name])
    module = importlib.import_module(name)
    assert set(module.__all__) <= set(dir(module))
    assert all(f"{public}(" in pydoc.plain(pydoc.render_doc(module)) for public in module.__all__)


@pytest.mark.parametrize("name", LAZY)
def test_help_of_lazy_modules_without_their_host(name, monkeypatch):
    module = importlib.import_module(name)
    for imported in list(sys.modules):
        if imported.split(".")[0] == LAZY[name] or imported.startswith(f"{name}."):
            monkeypatch.delitem(sys.modules, imported)
    monkeypatch.setitem(sys.modules, LAZY[name], None)
    assert module.__doc__.splitlines()[0] in pydoc.plain(pydoc.render_doc(module))


SUBPACKAGES = """
import sys
import packing_ops

names = [f"packing_ops.{name}" for name in ("data", "integrations", "parallel", "reference")]
assert not {*names} & {*sys.modules}, "at their first use"
assert {name.removeprefix("packing_ops.") for name in names} <= {*dir(packing_ops)}
for name in names:
    assert getattr(packing_ops, name.removeprefix("packing_ops.")) is sys.modules[name]
integrations = packing_ops.integrations
hosts = sys.argv[1:]
assert not {f"packing_ops.integrations.{host}" for host in hosts} & {*sys.modules}
assert {*hosts} <= {*dir(integrations)}
for host in hosts:
    assert getattr(integrations, host) is sys.modules[f"packing_ops.integrations.{host}"]
for package in (packing_ops, integrations):
    try:
        package.nothing
    except AttributeError as error:
        assert str(error) == f"module {package.__name__!r} has no attribute 'nothing'"
"""


def test_subpackages_are_imported_at_their_first_use(tmp_path):
    """As pages write them: packing_ops.integrations.trl.enable_padding_free, after only ``import packing_ops``."""
    there = [host for host in HOSTS if importlib.util.find_spec(NEEDS.get(host, "torch").partition(".")[0])]
    assert "flash_attn" in there
    fresh_process.run("-c", SUBPACKAGES, *there, *CONTRIB, folder=tmp_path)


def test_hosts_that_are_not_installed_are_not_listed():
    _, listed = lazy_modules({"__name__": "package"}, {"first": "torch", "second": "no_such_library"})
    assert listed() == ["__name__", "first"]


@pytest.mark.parametrize("name", PUBLIC)
def test_types_are_told(name):
    """For packing_ops/py.typed: whatever a type checker sees has annotations; mypy holds what is below."""
    for host, needed in NEEDS.items():
        if name.endswith(host):
            pytest.importorskip(needed)
    untyped = []
    for public, value in public_names(name).items():
        if public == "PackingDotProductAttention":  # its signatures are megatron-core's
            continue
        methods = {f"{public}.{n}": f for n, f in vars(value).items()} if inspect.isclass(value) else {public: value}
        for called, function in methods.items():
            if inspect.isfunction(function) and (not called.partition(".")[2].startswith("_") or "__call__" in called):
                signature = inspect.signature(function)
                annotations = [p.annotation for n, p in signature.parameters.items() if n != "self"]
                if inspect.Signature.empty in [*annotations, signature.return_annotation]:
                    untyped.append(called)
    assert untyped == []


NAMED = {"layout", "overlong", "reduction", "side", "strategy", "ties"}  # parameters that take one of a few names


def test_parameters_that_take_names_list_them():
    """An editor shows the names, and a type checker refuses others."""
    found = {}
    for module in (po, packing_ops.data):
        for name, value in ours(module).items():
            function = value.__init__ if inspect.isclass(value) else value
            hints = typing.get_type_hints(function) if inspect.isfunction(function) else {}
            found |= {(name, parameter): hint for parameter, hint in hints.items() if parameter in NAMED}
    assert {parameter for _, parameter in found} == NAMED
    for hint in found.values():
        literals = [h for h in (hint, *typing.get_args(hint)) if typing.get_origin(h) is typing.Literal]
        assert len(literals) == 1
        assert str not in (hint, *typing.get_args(hint))


def kinds(annotation):
    """Of a result: the members of a union, in a tuple too."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return set(typing.get_args(annotation))
    inner = typing.get_args(annotation) if typing.get_origin(annotation) is tuple else ()
    return {kind for part in inner for kind in kinds(part) if len(kinds(part)) > 1} or {annotation}


def fields(parameter):
    """(name, type) of each option that ``**options: Unpack[...]`` takes."""
    (keywords,) = typing.get_args(parameter.annotation)
    return typing.get_type_hints(keywords).items()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads is of Python 3.11")
def test_results_that_depend_on_arguments_are_overloads():
    functions = {name: v for module in (po, packing_ops.data) for name, v in ours(module).items()}
    functions = {name: value for name, value in functions.items() if inspect.isfunction(value)}
    depending = {name for name, f in functions.items() if len(kinds(typing.get_type_hints(f).get("return"))) > 1}
    assert depending == DEPENDING
    for name in depending:
        one = inspect.signature(functions[name])
        overloads = typing.get_overloads(functions[name])
        deciding = set()
        told = set()
        for overload in overloads:
            other = inspect.signature(overload)
            told.add(str(other.return_annotation))
            assert len(kinds(other.return_annotation)) == 1
            named = {n: p for n, p in other.parameters.items() if p.kind is not p.VAR_KEYWORD}
            assert [*named] == [n for n in one.parameters if n in named]
            options = {n: hint for rest in {*other.parameters} - {*named} for n, hint in fields(other.parameters[rest])}
            refused = {
                p.name for p in one.parameters.values() if p.kind is p.VAR_KEYWORD
            }  # keywords that it names in an error
            assert all(one.parameters[name].annotation is typing.NoReturn for name in refused)
            assert {*named} | {*options} == {*one.parameters} - refused
            hints = typing.get_type_hints(functions[name])
            assert {n: hints[n] for n in options} == options
            given = [p for p in named.values() if p.annotation == one.parameters[p.name].annotation]
            deciding |= {*named} - {p.name for p in given}
            assert all(p.default == one.parameters[p.name].default for p in given)
        assert len(told) == len(overloads) == len(deciding) + 1, "an argument more for each further result"


# Functions that took the documents of a row by another name, and that name.
RENAMED = {
    "token_logps": "metadata", "chunked_cross_entropy": "metadata", "token_kl": "metadata", "gae": "metadata",
    "router_statistics": "metadata", "load_balancing_loss": "metadata",
    "choose_attention": "documents", "gathered_attention": "documents", "shard_indices": "documents",
    "ulysses_attention": "documents", "unshard": "documents", "varlen_attention_over": "documents",
}  # fmt: skip


DOCUMENTS = po.PackedMetadata, torch.Tensor


def functions_with_documents():
    """{name: (function, parameters that take a PackedMetadata or a tensor)}"""
    found = {}
    for module in (po, packing_ops.parallel):
        for name, function in ours(module).items():
            hints = typing.get_type_hints(function) if inspect.isfunction(function) else {}
            takes = {n for n, hint in hints.items() if all(kind in typing.get_args(hint) for kind in DOCUMENTS)}
            found |= {name: (function, takes - {"return"})}
    return found


def test_documents_of_a_row_have_one_name():
    named = {name: takes for name, (_, takes) in functions_with_documents().items() if takes}
    assert named.keys() >= RENAMED.keys()
    positions = named.pop("apply_rotary_qk")
    assert positions == {"position_ids"}
    assert {*map(frozenset, named.values())} == {frozenset({"cu_seqlens"}), frozenset({"cu_seqlens_q", "cu_seqlens_k"})}


@pytest.mark.parametrize("name", RENAMED)
def test_the_old_name_works_and_warns(name):
    function, _ = functions_with_documents()[name]
    others = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    given = {other: None for other in others if other != "cu_seqlens"}
    warned = pytest.warns(DeprecationWarning, match=f"{RENAMED[name]}: {name} calls it cu_seqlens now")
    with warned as seen, pytest.raises((TypeError, ValueError, RuntimeError, AttributeError)) as error:
        function(**given, **{RENAMED[name]: None})
    assert seen[0].filename == __file__
    assert "unexpected keyword" not in str(error.value)
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{RENAMED[name]}'"):
        function(**given, cu_seqlens=None, **{RENAMED[name]: None})


def test_the_old_name_means_the_same():
    lengths = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.warns(DeprecationWarning, match="metadata: gae"):
        old = po.gae(torch.ones(3), torch.zeros(3), metadata=lengths, gamma=1.0, lam=1.0)
    torch.testing.assert_close(old, po.gae(torch.ones(3), torch.zeros(3), lengths, gamma=1.0, lam=1.0), rtol=0, atol=0)


OLD = {  # {package: {older name: name}}, until the next minor version
    "integrations.transformers": {"unregister": "revert_registration"},
    "integrations.trl": {
        "disable_padding_free": "revert_padding_free",
        "disable_sequence_parallel": "revert_sequence_parallel",
        "disable_tree_attention": "revert_tree_attention",
        "unpatch_pack_dataset": "revert_pack_dataset",
        "unregister": "revert_registration",
    },
    "integrations.megatron": {"unpatch_rope": "revert_rope", "unpatch_router": "revert_router"},
    "integrations.flash_attn": {"remove_flash_attn_alias": "revert_flash_attn_alias"},
    "integrations.vllm": {"unregister": "revert_registration"},
    "integrations.ring_flash_attn": {
        "remove_ring_flash_attn_alias": "revert_ring_flash_attn_alias",
        "restore_hf_flash_attn": "revert_hf_flash_attn",
    },
}


@pytest.mark.parametrize("package", OLD)
def test_older_names_work_and_warn(package):
    if needed := NEEDS.get(package.rpartition(".")[2]):
        pytest.importorskip(needed)
    module = importlib.import_module(f"packing_ops.{package}")
    for old, new in OLD[package].items():
        with pytest.warns(DeprecationWarning, match=f"{old}: it is called {new} now"):
            assert getattr(module, old) is getattr(module, new)
        assert old not in dir(module)
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = module.nothing_of_this_name


def test_older_names_of_a_tree_work_and_warn():
    tree = po.pack_prefix_tree(torch.tensor([5, 6, 7, 5, 6]), [0, 3, 5])
    paths = po.PackedMetadata.from_prefix_tree(tree).paths
    names = {
        "rows": "token_of_slot",
        "row_of_token": "slot_of_token",
        "num_rows": "num_slots",
        "rows_before": "slots_before",
    }
    of_both = [(tree, names), (paths, {"row_of_key": "slot_of_key", "keys_of_row": "keys_of_slot"})]
    for found, renamed in of_both:
        for old, new in renamed.items():
            with pytest.warns(DeprecationWarning, match=f"{old}: it is called {new} now"):
                value = getattr(found, old)
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(getattr(found, new)))
        with pytest.raises(AttributeError, match=f"'{type(found).__name__}' object has no attribute 'no_such'"):
            _ = found.no_such
        assert type(copy.copy(found)) is type(pickle.loads(pickle.dumps(found))) is type(found)


def test_what_a_call_changes_is_reverted_by_one_verb():
    """One verb in all packages, so that its completion finds each."""
    others = "undo|restore|remove|disable|unpatch|unregister|uninstall|detach|deactivate|reset"
    calls = [
        f"{name}.{public}" for name in PUBLIC if name.rpartition(".")[2] not in NEEDS for public in public_names(name)
    ]
    calls += [f"packing_ops.{package}.{new}" for package, names in OLD.items() for new in names.values()]
    assert [call for call in calls if re.match(f"({others})(_|$)", call.rpartition(".")[2])] == []
    assert sum(call.rpartition(".")[2].startswith("revert_") for call in calls) >= 10


@pytest.mark.parametrize(
    ("old", "call", "given"),
    [
        ("max_seq_length", packing_ops.data.PaddingFreeCollator, {}),
        ("max_seq_length", packing_ops.data.PaddingFreeDPOCollator, {}),
        ("max_tokens", packing_ops.data.token_budget_microbatches, {"lengths": [3, 4], "dp_size": 1}),
    ],
)
def test_names_of_the_last_version_mean_the_same(old, call, given):
    """One that was released works for a minor version."""
    with pytest.warns(DeprecationWarning, match=f"{old}: {call.__name__} calls it capacity now") as seen:
        assert call(**given, **{old: 5}) == call(**given, capacity=5)
    assert seen[0].filename == __file__
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{old}'"):
        call(**given, capacity=5, **{old: 5})


def test_the_old_name_breaks_no_graph():
    cu_seqlens, rewards = torch.tensor([0, 3], dtype=torch.int32), torch.ones(3)

    def advantages(rewards):
        return po.gae(rewards, torch.zeros(3), metadata=cu_seqlens, gamma=1.0, lam=1.0)

    found = torch.compile(advantages, fullgraph=True, backend="aot_eager")(rewards)
    wanted = po.gae(rewards, torch.zeros(3), cu_seqlens, gamma=1.0, lam=1.0)
    assert [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)] == [True, True]
