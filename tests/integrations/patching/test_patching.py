"""Patches of other libraries: what is applied and reverted leaves no trace in the host."""

import functools
import gc
import sys
import threading
import types
import weakref
from unittest import mock

import pytest
import torch

from packing_ops.integrations import flash_attn
from packing_ops.integrations._patching import Patch, calls, put_class, stock_of

# --- every host, before and after ---


def state_of(host):
    """{(module or class, name): value} of all modules of a library that are imported, and of the classes in them."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != host or not isinstance(module, types.ModuleType):
            continue
        owners = [module, *(v for v in vars(module).values() if isinstance(v, type) and v.__module__ == name)]
        for owner in owners:
            for key, value in vars(owner).items():
                table = {k: id(v) for k, v in value.items()} if type(value) is dict else None
                found[owner, key] = value, set(value) if type(value) is set else table
    return {key: value for key, value in found.items() if key[1] != "__warningregistry__"}


def changes(before, after):
    none = (None, None)
    pairs = ((key, before.get(key, none), after.get(key, none)) for key in before.keys() | after.keys())
    return {(owner.__name__, name) for (owner, name), a, b in pairs if a[0] is not b[0] or a[1] != b[1]}


def llama():
    from helpers.hf_models import tiny_model

    return tiny_model("llama").train()


def registered():
    from packing_ops.integrations.transformers import register, revert_registration

    return (
        lambda: register("for_a_test"),
        lambda: revert_registration("for_a_test"),
        {"_preprocess_mask_arguments", "__call__"},
    )


def one_llama():
    from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops

    model = llama()
    options = {"rms_norm": True, "fused_loss": True}
    return lambda: apply_packing_ops(model, **options), lambda: revert_packing_ops(model), {"apply_rotary_pos_emb"}


def megatron_rope():
    from packing_ops.integrations.megatron import patch_rope, revert_rope

    names = {"apply_rotary_pos_emb", "fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd", "__post_init__"}
    return patch_rope, revert_rope, names


def trl_packing():
    from packing_ops.integrations.trl import patch_pack_dataset, revert_pack_dataset

    return patch_pack_dataset, revert_pack_dataset, {"pack_dataset"}


def ring_substitution():
    from packing_ops.contrib.ring_flash_attn import revert_hf_flash_attn, substitute_hf_flash_attn

    return lambda: substitute_hf_flash_attn(None), revert_hf_flash_attn, {"_global_mapping"}


@pytest.fixture
def no_name_registered():
    pytest.importorskip("transformers")
    from packing_ops.integrations.transformers import call, register, revert_registration

    names = list(call.NAMES)
    for name in names:
        revert_registration(name)
    yield
    for name in names:
        register(name)


@pytest.mark.parametrize(
    ("host", "case"),
    [
        ("transformers", registered),
        ("transformers", one_llama),
        ("megatron", megatron_rope),
        ("trl", trl_packing),
        ("transformers", ring_substitution),
    ],
)
def test_the_host_is_as_before(host, case, no_name_registered):
    pytest.importorskip({"megatron": "megatron.core"}.get(host, host))
    gc.collect()  # swapped models of other tests
    apply, revert, names = case()
    apply()  # the first time imports what it needs
    revert()
    before = state_of(host)
    apply()
    changed = {name for _, name in changes(before, state_of(host))}
    assert names <= changed
    revert()
    assert changes(before, state_of(host)) == set()


def test_imports_are_as_before():
    finders, modules = list(sys.meta_path), {name for name in sys.modules if name.startswith("flash_attn")}
    if not flash_attn.install_flash_attn_alias():
        pytest.skip("flash-attn is installed, and stays in use")
    assert sys.meta_path != finders
    flash_attn.revert_flash_attn_alias()
    assert sys.meta_path == finders
    assert {name for name in sys.modules if name.startswith("flash_attn")} == modules


# --- the patch itself ---


class Host:
    def method(self):
        return "stock"


STOCK = Host.method


class Child(Host):
    """Inherits method."""


class User:
    pass


@pytest.fixture(autouse=True)
def host_is_stock():
    yield
    assert Host().method() == Child().method() == "stock"
    assert "method" not in vars(Child)


def ours(stock):
    return lambda self: f"ours over {stock(self)}"


def test_the_last_user_reverts():
    patch, (first, second) = Patch(Host, "method", ours), (User(), User())
    for user in (first, second, first):
        patch.apply(user)
    assert Host().method() == "ours over stock"
    patch.revert(first)
    patch.revert(first)
    assert patch.is_applied
    patch.apply()
    patch.revert(second)
    assert patch.is_applied
    patch.revert()
    assert not patch.is_applied


def test_users_that_die_revert():
    patch, user, kept = Patch(Host, "method", ours), User(), User()
    patch.apply(user)
    patch.apply(kept)
    del user
    gc.collect()
    assert patch.is_applied
    del kept
    gc.collect()
    assert not patch.is_applied


def test_what_was_inherited_is_deleted():
    patch = Patch(Child, "method", ours)
    patch.apply()
    assert (Host().method(), Child().method()) == ("stock", "ours over stock")
    patch.revert()


def test_what_others_put_over_ours_stays():
    stock, patch = Host.method, Patch(Host, "method", ours)
    patch.apply()
    over = vars(Host)["method"]
    Host.method = lambda self: f"theirs over {over(self)}"
    patch.revert()
    assert Host().method() == "theirs over ours over stock"
    patch.apply()
    assert Host().method() == "ours over theirs over ours over stock"
    patch.revert()
    assert Host().method() == "theirs over ours over stock"
    Host.method = stock


@pytest.mark.parametrize("reverted", [False, True])
def test_what_others_put_over_ours_and_take_away(reverted):
    patch, users = Patch(Host, "method", ours), [User(), User()]
    patch.apply(users[0])
    under = vars(Host)["method"]
    for _ in range(2):
        Host.method = lambda self: f"theirs over {under(self)}"
        if reverted:
            patch.revert(users[0])
        patch.apply(users[1])
        assert Host().method() == "ours over theirs over ours over stock"
        Host.method = under
        patch.apply(users[1])
        assert vars(Host)["method"] is under
    for user in users:
        patch.revert(user)
    assert Host().method() == "stock"


def test_what_others_uncover_after_the_last_revert():
    patch = Patch(Host, "method", ours)
    patch.apply()
    under = vars(Host)["method"]
    Host.method = lambda self: f"theirs over {under(self)}"
    patch.revert()
    Host.method = under
    patch.revert()
    assert Host().method() == "stock"


def test_a_patch_that_cannot_be_made_changes_nothing():
    def refuse(stock):
        raise ImportError("another version")

    patch = Patch(Host, "method", refuse)
    for user in (None, User()):
        with pytest.raises(ImportError, match="another version"):
            patch.apply(user)
        assert not patch.pinned
    patch.revert()


def test_importers_of_one_package(monkeypatch):
    stock = Host.method
    inside, outside = (types.SimpleNamespace(method=stock) for _ in range(2))
    monkeypatch.setitem(sys.modules, "a_host.part", inside)
    monkeypatch.setitem(sys.modules, "another.part", outside)
    patch = Patch(Host, "method", ours, imported_by="a_host")
    patch.apply()
    assert inside.method is Host.method is not stock
    assert outside.method is stock
    patch.revert()
    assert inside.method is outside.method is Host.method is stock


# --- modules that imported what is replaced, beside another library's wrapper ---


@pytest.fixture
def imported(monkeypatch):
    """Put a module that imported Host.method into a_host: imported("early") is one by that name."""

    def module(name):
        made = types.SimpleNamespace(method=Host.method)
        monkeypatch.setitem(sys.modules, f"a_host.{name}", made)
        return made

    yield module
    Host.method = STOCK


def wrap():
    """Put a wrapper of another library over what there is, and return it."""
    under = vars(Host)["method"]
    Host.method = over = lambda self: f"theirs over {under(self)}"
    return over


SAME = ours(STOCK)
MAKES = {"another each time": ours, "always the same": lambda stock: SAME}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_importers_get_back_what_they_had_beside_anothers_wrapper(make, imported):
    """Before, between and behind the wrapper and a second apply; another package's stays."""
    patch, early = Patch(Host, "method", make, imported_by="a_host"), imported("early")
    patch.apply()
    between = imported("between")
    theirs = wrap()
    behind = imported("behind")
    for again in range(2):
        patch.apply()
        late = imported(f"late {again}")
        assert (early.method is between.method, early.method is STOCK) == (True, False)
        assert (behind.method is late.method is Host.method, late.method is theirs) == (True, False)
        patch.revert()
        assert early.method is between.method is STOCK
        assert behind.method is late.method is Host.method is theirs


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_importers_when_another_takes_its_wrapper_away(make, imported):
    patch, early = Patch(Host, "method", make, imported_by="a_host"), imported("early")
    patch.apply()
    under = Host.method
    wrap()
    patch.revert()
    assert early.method is STOCK
    Host.method = under
    patch.revert()
    assert early.method is Host.method is STOCK


def test_two_patches_with_one_function(imported):
    """The second goes over a wrapper around the first's, as two parts of a program apply theirs."""
    same, early = ours(STOCK), imported("early")
    first, second = (Patch(Host, "method", lambda _: same, imported_by="a_host") for _ in range(2))
    first.apply()
    theirs = wrap()
    second.apply()
    second.revert()
    assert (early.method, Host.method) == (same, theirs)
    first.revert()
    assert (early.method, Host.method) == (STOCK, theirs)


def test_modules_without_the_name_get_none(imported):
    without, none = imported("without"), imported("none")
    del without.method
    none.method = None
    for stock in (None, STOCK):
        Host.method = stock
        patch = Patch(Host, "method", lambda _: ours(STOCK), imported_by="a_host")
        patch.apply()
        Host.method = wrapper = lambda self: None
        patch.apply()
        assert (none.method is None) is (stock is STOCK)
        patch.revert()
        assert Host.method is wrapper
        assert (vars(without), vars(none)) == ({}, {"method": None})


def test_threads():
    """Each applies and reverts for itself, and finds ours in between."""
    patch, wrong = Patch(Host, "method", ours), []

    def work():
        for _ in range(300):
            user = User()
            patch.apply(user)
            if Host().method() != "ours over stock":
                wrong.append(1)
            patch.revert(user)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not patch.is_applied


def test_modules_of_a_class_share_a_subclass_that_goes_with_them():
    class Stock(torch.nn.Identity):
        pass

    def forward(self, x):
        return -x

    modules = [Stock(), Stock()]
    for module in modules:
        put_class(module, forward)
    ours = type(modules[0])
    assert (type(modules[1]), stock_of(ours), ours.__name__) == (ours, Stock, "Stock")
    assert modules[1](torch.ones(())) == -1
    classes = [weakref.ref(Stock), weakref.ref(ours)]
    del module, modules, Stock, ours
    gc.collect()  # the subclass
    gc.collect()  # what it was made of
    assert [reference() for reference in classes] == [None, None]


# --- what is in front of a function ---


def test_a_function_is_found_behind_others():
    def ours():
        pass

    def in_front(function, is_late):
        def call():
            return function(), late

        if is_late:
            late = 1  # else an empty cell
        return call

    assert calls(in_front(functools.partial(ours), True), ours, {})
    assert calls(in_front(in_front(ours, False), False), ours, {})
    assert not calls(in_front(in_front(print, False), False), ours, {})


def test_what_holds_itself_is_looked_at_once():
    looked = []

    class Many:
        def call(self):
            pass

        def __getattribute__(self, name):
            looked.append(name)
            return super().__getattribute__(name)

    many = Many()
    for number in range(20):
        setattr(many, f"call{number}", many.call)
    looked.clear()
    assert not calls(many.call, test_what_holds_itself_is_looked_at_once, {})
    assert len(looked) < 100


def test_a_chain_without_an_end_is_looked_at_for_a_while():
    endless, ours = mock.MagicMock(), test_a_chain_without_an_end_is_looked_at_for_a_while
    assert not calls(lambda: endless, ours, {})
    assert calls(lambda: (endless, ours), ours, {})
