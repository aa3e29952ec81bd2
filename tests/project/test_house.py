"""Rules that keep docs and code together, and caps on what a reader has to know: names, state, patches, trips,
statements.
"""

import ast
import re

import pytest
from helpers import ROOT
from helpers.public_names import NEEDS, PUBLIC, public_names

from tools import trips
from tools.trips import Trip

READS = re.compile(r"(os\.)?(environ\.(get|setdefault|pop)|getenv)")
API = {
    "packing_ops": "packing_ops.md",
    "packing_ops.data": "data.md",
    "packing_ops.parallel": "parallel.md",
    "packing_ops.optim": "optim.md",
}  # the others: integrations.md


def documented(name):
    """The names that docs/api shows of a package."""
    text = (ROOT / "docs" / "api" / API.get(name, "integrations.md")).read_text()
    shown = re.findall(r"^<!-- api: (\S+)\.(\w+) -->$", text, re.M)
    return [public for module, public in shown if name in API or module == name]


@pytest.mark.parametrize("name", PUBLIC)
def test_all_equals_the_api_pages(name):
    for host, needed in NEEDS.items():
        if name.endswith(host):
            pytest.importorskip(needed)
    assert sorted(documented(name)) == sorted(public_names(name))


def test_the_api_pages_show_nothing_else():
    (left_out,) = {page.name for page in (ROOT / "docs" / "api").glob("*.md")} - {*API.values()}
    shown = re.findall(r"^<!-- api: (\S+)\.\w+ -->$", (ROOT / "docs" / "api" / left_out).read_text(), re.M)
    assert {*shown} == {*PUBLIC} - {*API}


def python_variables(text):
    """The environment variables that a module reads: by name, or one after the other from a list in it."""
    tree = ast.parse(text)
    lists = {
        target.id: node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets
        if isinstance(target, ast.Name)
    }  # fmt: skip
    loops = {
        node.target.id: lists.get(getattr(node.iter, "id", None), node.iter)
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name)
    }
    found = set()
    for node in ast.walk(tree):
        key = None
        if isinstance(node, ast.Subscript) and is_environ(node.value):
            key = node.slice
        elif isinstance(node, ast.Call) and READS.fullmatch(ast.unparse(node.func)):
            key = node.args[0]
        elif isinstance(node, ast.Compare) and is_environ(node.comparators[0]):
            key = node.left
        if key is not None:
            source = loops[key.id] if isinstance(key, ast.Name) else key
            found |= {n.value for n in ast.walk(source) if isinstance(n, ast.Constant)}
    return found


def is_environ(node):
    return ast.unparse(node) in ("os.environ", "environ")


def variables_of_the_code():
    found = set()
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in {".cpp", ".cu", ".h", ".cuh"}:
            found |= set(re.findall(r'getenv\("(\w+)"\)', path.read_text()))
    folders = ("packing_ops", "tools", "examples", "benchmarks")
    for path in [ROOT / "setup.py", *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]:
        found |= python_variables(path.read_text())
    return found


def test_every_environment_variable_is_documented():
    _, section = (ROOT / "docs" / "errors-and-env.md").read_text().split("\n## Environment variables\n")
    named = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", section))
    read = variables_of_the_code()
    assert {"PACKING_OPS_CHECK", "PACKING_OPS_SHARED_MEMORY", "FORCE_CUDA", "CUDA_PATH", "OMP_NUM_THREADS"} <= read
    assert named == read | {"MAX_JOBS"}  # that one is torch's


def test_how_a_variable_is_read_does_not_hide_it():
    text = """
import os
NAMES = ("D", "E")
os.environ["A"], os.environ.get("B", ""), "C" in os.environ, os.getenv("F")
for name in NAMES:
    os.environ[name]
for other in ("G", "H"):
    os.environ.get(other)
"""
    assert python_variables(text) == set("ABCDEFGH")


def names_softcap(path):
    """In its code: comments and docstrings do not count."""
    if path.suffix == ".py":
        nodes = ast.walk(ast.parse(path.read_text()))
        return any("softcap" in (getattr(node, "arg", ""), getattr(node, "id", "")) for node in nodes)
    is_code = path.suffix in {".cpp", ".cu", ".h", ".cuh"}
    return is_code and re.search(r"\bsoftcap\b", re.sub("//.*", "", path.read_text())) is not None


def test_an_option_of_attention_is_in_the_files_that_contributing_names():
    sections = (ROOT / "CONTRIBUTING.md").read_text().split("\n## ")
    (section,) = (text for text in sections if text.startswith("Add an option of attention\n"))
    files = [*(ROOT / "csrc").rglob("*"), *(ROOT / "packing_ops").rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in files if names_softcap(path)}
    found = {name for name in found if not re.search("logps|prefix_tree", name)}  # that is of log-probabilities
    table, of_hosts = (
        set(re.findall(r"`((?:csrc|packing_ops)/[^`]+)`", text)) for text in section.split("\n\nGroup attention")
    )
    assert found == table | of_hosts
    assert len(table) == 14


def test_figures_are_those_of_the_result_files():
    pytest.importorskip("tomllib")  # of Python 3.11
    import render

    stale = {page.name: changed for page in render.PAGES for _, changed in [render.rewritten(page.read_text(), page)]}
    assert {page: changed for page, changed in stale.items() if changed} == {}, "make readme"
    assert {"README.md", "performance.md", "report.md"} <= {*stale}


def test_public_modules_are_checked_by_mypy():
    """All but those that pyproject.toml names, which are there and private."""
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    named = {True: set(), False: set()}
    for part in settings["overrides"]:
        if "ignore_errors" in part:
            named[part["ignore_errors"]].update(part["module"])
    assert settings["disallow_untyped_defs"]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "packing_ops").rglob("*.py")}
    modules = {name.removesuffix(".__init__") for name in modules}
    integrations = {name for name in modules if name.startswith("packing_ops.integrations.")}
    assert named[True] - {"packing_ops.integrations.*"} <= modules - integrations
    assert named[False] <= integrations | {"packing_ops.integrations"}
    unchecked = (named[True] | integrations) - named[False]
    private = re.compile(r"packing_ops(\.data)?\._\w+(\.\w+)?|packing_ops\.integrations\.(\w+\.\w+|_\w+)(\.\w+)*|.*\*")
    assert [name for name in sorted(unchecked) if not private.fullmatch(name)] == []


def test_versions_are_one():
    from packing_ops._runtime.library import VERSION

    versions = re.findall(r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == VERSION


# --- state and size of the package ---

# What is filled while a program runs, and by whom it is emptied.
STATE = {
    "_runtime.batch_cache._tensor_caches",  # goes with its tensors
    "_runtime.arguments.warned",  # warnings that were given
    "invariance.mode._holders",  # who is in the mode of invariant() or apply_packing_ops, and goes with it
    "integrations._patching._subclasses",  # goes with the modules of these classes
    "integrations._patching._left",  # patches to take back when nothing is compiled
    "contrib.ring_flash_attn.hf._kept",  # update_ring_flash_attn_params, revert_hf_flash_attn
    "integrations.transformers.call.NAMES",  # register, revert_registration
    "integrations.transformers.versions.graphs",  # whether there was one, in this process
    "integrations.transformers.apply._hosts",  # goes with its models
    "integrations.transformers.rope.PATCHES",  # apply_packing_ops, revert_packing_ops
    "integrations.transformers.states.stateful._prepared",  # layers, and goes with them; revert_registration
    "parallel.collectives.planned",  # StepPlan.group_for, and by it
    "parallel.collectives._inherited_groups",  # goes with its groups; filled by a fork, os.register_at_fork
}
COUNTERS = {"_runtime.batch_cache._forgotten"}
LONG = {"_runtime.autograd.register_autograd"}  # torch's, rebuilt: its parts belong together
# Private functions with the arguments of an op or of another library's function.
MIRRORS = {
    "losses.op._token_logps",
    "integrations.transformers.states.linear_attention._delta_rule",
    "integrations.transformers.states.linear_attention._mamba2",
    "integrations.trl.fused_logps._apply",
}  # fmt: skip
MODULES = {
    ".".join(path.relative_to(ROOT / "packing_ops").with_suffix("").parts): ast.parse(path.read_text())
    for path in sorted((ROOT / "packing_ops").rglob("*.py"))
}


def statements(nodes):
    """How many there are in the nodes and below, without docstrings."""
    inside = [node for top in nodes for node in ast.walk(top) if isinstance(node, ast.stmt)]
    return sum(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in inside)


def functions():
    """(module.name, node) of each function and method."""
    for module, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                yield f"{module}.{node.name}", node


def test_state_of_modules_is_on_the_list():
    empty = {
        "{}",
        "[]",
        "set()",
        "dict()",
        "list()",
        "weakref.WeakSet()",
        "weakref.WeakKeyDictionary()",
        "weakref.WeakValueDictionary()",
    }
    found, counters = set(), set()
    for module, tree in MODULES.items():
        for node in tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value and ast.unparse(node.value) in empty:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                found.add(f"{module}.{ast.unparse(target)}")
        counters |= {f"{module}.{n}" for node in ast.walk(tree) if isinstance(node, ast.Global) for n in node.names}
    assert found == STATE
    assert counters == COUNTERS


def test_functions_are_short():
    assert {name for name, node in functions() if statements(node.body) > 50} == LONG


def test_private_functions_take_few_arguments():
    """Public ones have the options of their op."""
    counts = {name: [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs] for name, node in functions()}
    many = {name for name, given in counts.items() if len(given) > 8 and re.match("_[a-z]", name.rpartition(".")[2])}
    assert many == MIRRORS


# --- caps on concepts: each is the figure of the day on which it was last lowered; raise one only for a reason ---

# Names that a package shows.
NAMES = {
    "packing_ops": 64,
    "packing_ops.data": 32,
    "packing_ops.parallel": 14,
    "packing_ops.optim": 1,
    "packing_ops.integrations.transformers": 9,
    "packing_ops.integrations.trl": 12,
    "packing_ops.integrations.megatron": 15,
    "packing_ops.contrib.unsloth": 8,
    "packing_ops.integrations.flash_attn": 9,
    "packing_ops.contrib.ring_flash_attn": 9,
    "packing_ops.contrib.open_instruct": 5,
    "packing_ops.integrations.vllm": 3,
}
# What Patch replaces in a host, by file: the attribute, and where it is.
PATCHES = {
    "integrations._additions": {"PushToHubMixin.__init_subclass__", "cls.__call__"},
    "integrations.megatron.rope": {
        "TransformerConfig.__post_init__",
        "attention.Attention.forward",
        "attention.HAVE_FUSED_QKV_ROPE",
        "attention.SelfAttention.get_query_key_value_tensors",
        "attention.apply_fused_qkv_rotary_pos_emb",
        "rope_utils.apply_rotary_pos_emb",
        "rope_utils.fused_apply_rotary_pos_emb",
        "rope_utils.fused_apply_rotary_pos_emb_thd",
    },
    "integrations.megatron.router": {
        "TopKRouter._apply_seq_aux_loss", "TopKRouter.routing", "TransformerLayer.forward"
    },
    "integrations.transformers.attention": {
        "PreTrainedModel.__call__", "PreTrainedModel._check_and_adjust_attn_implementation"
    },
    "integrations.transformers.continuous_batching": {
        "initialization.ensure_decode_fast_path_is_available",
        "module.is_flash_attention_requested",
        "runner.ModelRunner._sample",
    },
    "integrations.transformers.fused_loss": {"importlib.import_module(module_name)._BALANCE"},
    "integrations.transformers.checkpoints": {"vars(checkpoint)[owner].method"},
    "integrations.transformers.states.linear_attention": {"module.name"},
    "integrations.transformers.masks": {"masking_utils._preprocess_mask_arguments"},
    "integrations.transformers.other_attention": {"cls.__setattr__"},
    "integrations.transformers.rope": {"module.name"},
    "integrations.trl.fused_logps": {"utils._ChunkedLogProbFunction"},
    "integrations.trl.packing": {"data_utils.pack_dataset"},
    "integrations.trl.trees": {"_packing().tree_attention"},
    "integrations.vllm.__init__": {
        "EngineArgs.create_engine_config", "type(current_platform).get_attn_backend_cls",
    },
    "integrations.vllm.layers": {
        "GeluAndMul.forward", "GemmaRMSNorm.forward", "RMSNorm.forward", "RotaryEmbedding.forward", "SiluAndMul.forward",
        "Sampler.compute_logprobs", "Sampler.forward", "Sampler.sample", "SecondSampler.sample",
        "UnquantizedEmbeddingMethod.apply", "UnquantizedLinearMethod.apply",
        "UnquantizedLinearMethod.process_weights_after_loading",
        "logprob.compute_token_logprobs",
    },
}  # fmt: skip
# Starred parameters that hide what comes; those of an overload are named by their TypedDict.
CATCH_ALLS = {"options", "others", "given", "rest", "arguments", "more"}
MOST_CATCH_ALLS = 25
# Statements of a floor: a folder of the package, less those below it that are listed too; or its modules on top.
STATEMENTS = {
    "packing_ops": 1505,  # OpenChunk, what it checks, and z came
    "_runtime": 1017,  # older names came, and go with the next minor version; register_recurrence
    "contrib": 412,
    "data": 2081,
    "integrations": 2363,  # vLLM, its graphs, its second runner, its bits under TRL, states over ranks, trees, older names, Kimi's came; what is in front of ours
    "integrations/transformers": 2697,  # another attention later, one that ran, configs that models share, and caches whose first layer counts none, came
    "integrations/transformers/states": 875,  # calls that go on with a cache came
    "invariance": 703,  # rollouts came, what is none, and rows of narrow products
    "losses": 582,
    "optim": 119,
    "parallel": 994,  # states over ranks came
    "reference": 722,
    "report": 888,
    "varlen": 705,
}
# (stays, returns) of an argument on its way to the op, by tools/trips.py.
TRIPS = {
    "varlen/attention.py:varlen_attention:q": (11, 5),
    "integrations/transformers/attention.py:packing_ops_attention:query": (23, 10),
    "integrations/megatron/core_attention.py:PackingDotProductAttention.forward:packed_seq_params": (29, 16),
    "losses/logps.py:token_logps:hidden": (2, 0),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_few(name):
    for host, needed in NEEDS.items():
        if name.endswith(host):
            pytest.importorskip(needed)
    assert len(public_names(name)) <= NAMES[name]


def test_patches_of_hosts_are_on_the_list():
    found = {}
    for module, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Patch":
                owner, name = map(ast.unparse, node.args[:2])
                found.setdefault(module, set()).add(f"{owner}.{name.strip(chr(39))}")
    assert found == PATCHES


def test_catch_alls_are_few():
    starred = [each for _, node in functions() for each in (node.args.vararg, node.args.kwarg) if each]
    hiding = [each.arg for each in starred if not ast.unparse(each.annotation or each).startswith("Unpack[")]
    assert sum(name in CATCH_ALLS for name in hiding) <= MOST_CATCH_ALLS


def test_statements_of_each_floor():
    found = {}
    for module, tree in MODULES.items():
        floor = max(
            (each for each in STATEMENTS if module.startswith(each.replace("/", ".") + ".")),
            key=len,
            default="packing_ops",
        )
        found[floor] = found.get(floor, 0) + statements(tree.body)
    assert {*found} == {*STATEMENTS}
    assert {floor: count for floor, count in found.items() if count > STATEMENTS[floor]} == {}


@pytest.mark.parametrize("start", TRIPS)
def test_trips_are_short(start):
    trip = Trip(start)
    stays, returns = TRIPS[start]
    assert (len(trip.stays) <= stays, trip.returns <= returns) == (True, True), (trip.stays, trip.lost)


def test_a_trip_goes_where_its_argument_goes(tmp_path, monkeypatch):
    """Along assignments, tuples, keywords, partial and methods; not by sizes, errors and what is not made of it."""
    (tmp_path / "first.py").write_text("""
from packing_ops import third
from packing_ops.second import Kept, end, middle, unused
def start(q, other):
    if q.dim() != 3:
        raise ValueError(unused(q))
    rows = q.shape[0]
    unused(rows, other)
    a, b = q[0], other
    unused(b)
    middle(other, name=(a, 1))
    partial(end, a)
    for part in [a]:
        third.last(part)
    Kept(part).of(part)
""")
    (tmp_path / "second.py").write_text("""
class Kept:
    def __init__(self, value):
        self.put(value)
    def put(self, value):
        end(value)
def middle(other, name):
    end(name)
def end(x):
    x.call(x)
def unused(x):
    from_nowhere(x)
""")
    (tmp_path / "third.py").write_text("from packing_ops.first import start\ndef last(x):\n    start(x, 1)\n")
    monkeypatch.setattr(trips, "PACKAGE", tmp_path)
    trip = Trip("first.py:start:q")
    assert trip.stays == ["first.py", "second.py", "third.py", "first.py", "second.py"]
    assert trip.returns == 2
    assert [lost.split(" ")[0] for lost in trip.lost] == ["x.call", "Kept(part).of"]
    assert trip.passed == {
        ("first.py", "start"), ("second.py", "middle"), ("second.py", "end"), ("third.py", "last"),
        ("second.py", "Kept.__init__"), ("second.py", "Kept.put"),
    }  # fmt: skip
