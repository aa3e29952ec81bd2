"""The alias of flash_attn, in separate processes where nothing else has looked for it."""

import importlib.util
import tempfile
import textwrap
from pathlib import Path

import pytest
from helpers import ROOT, fresh_process

transformers_installed = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)


def run(code, *extra_paths):
    """What the code printed; it must end well."""
    code = (
        "from packing_ops.integrations.flash_attn import install_flash_attn_alias, revert_flash_attn_alias\n"
        + textwrap.dedent(code)
    )
    with tempfile.TemporaryDirectory() as folder:
        return fresh_process.run("-c", code, folder=Path(folder), paths=[*extra_paths, ROOT])


needs_absence = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")


@needs_absence
def test_alias_serves_what_hosts_import():
    run(
        """
        import importlib.metadata, importlib.util, packing_ops.integrations.flash_attn as ours
        assert install_flash_attn_alias() is True
        assert install_flash_attn_alias() is True
        from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
        from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func
        from flash_attn.bert_padding import index_first_axis, index_put_first_axis, pad_input, rearrange, unpad_input
        from flash_attn.layers.rotary import apply_rotary_emb
        from flash_attn.ops.triton.rotary import apply_rotary
        import flash_attn
        assert flash_attn_varlen_func is ours.flash_attn_varlen_func
        assert flash_attn.bert_padding.pad_input is pad_input
        assert importlib.util.find_spec("flash_attn").name == "flash_attn"
        assert importlib.metadata.version("flash_attn") == flash_attn.__version__ == "2.8.3+packing.ops"
        assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
        assert "packing_ops" in importlib.metadata.metadata("flash-attn")["Summary"]
        """
    )


@needs_absence
@pytest.mark.parametrize("installed", [True, False])
def test_rearrange_is_that_of_einops(installed):
    """Its name is there without einops too, for hosts that import it next to others; only a call needs einops."""
    run(
        f"""
        import sys, types
        theirs = types.ModuleType("einops")
        theirs.rearrange = lambda tensor, pattern: (tensor, pattern)
        sys.modules["einops"] = theirs if {installed} else None
        install_flash_attn_alias()
        from flash_attn.bert_padding import rearrange, unpad_input
        try:
            assert rearrange(1, "b s -> (b s)") == (1, "b s -> (b s)") and {installed}
        except ImportError as error:
            assert "pip install einops" in str(error) and not {installed}
        """
    )


@needs_absence
def test_code_of_reinforcement_learning_hosts():
    """Padding out as verl and SkyRL write it, attention over the rows, padding back: each row as without others."""
    run(
        """
        import torch
        install_flash_attn_alias()
        from flash_attn import flash_attn_varlen_func
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
        torch.manual_seed(0)
        mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
        ids, positions = torch.randint(1, 50, (3, 5)), (mask.cumsum(1) - 1).clamp(min=0)
        ids_rmpad, indices, cu_seqlens, max_seqlen, *_ = unpad_input(ids.unsqueeze(-1), mask)
        ids_rmpad = ids_rmpad.transpose(0, 1)  # [1, total]
        flat = positions.unsqueeze(-1).flatten(0, 1)
        positions_rmpad = index_first_axis(flat, indices).transpose(0, 1)
        assert ids_rmpad.tolist() == [ids[mask.bool()].tolist()]
        assert positions_rmpad.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0]]
        assert (cu_seqlens.tolist(), max_seqlen) == ([0, 3, 8, 9], 5)

        table = torch.randn(50, 2, 8, requires_grad=True)
        x = table[ids_rmpad[0]]
        out = flash_attn_varlen_func(x, x, x, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)
        padded = pad_input(hidden_states=out, indices=indices, batch=3, seqlen=5)
        (gradient,) = torch.autograd.grad(padded.square().sum(), table)
        alone, total = torch.zeros(3, 5, 2, 8), 0.0
        for row, real, place in zip(ids, mask.bool(), alone, strict=True):
            y = table[row[real]].transpose(0, 1)
            own = torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(0, 1)
            total = total + own.square().sum()
            place[real] = own.detach()
        torch.testing.assert_close(padded, alone, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient, torch.autograd.grad(total, table)[0], rtol=1e-5, atol=1e-5)
        """
    )


NOT_SERVED = [
    "from flash_attn.ops.triton.cross_entropy import cross_entropy_loss",
    "import flash_attn.cute",
    "from flash_attn import losses",
    "from flash_attn import no_such_function",
]


@needs_absence
def test_the_rest_of_flash_attn_is_a_clear_import_error():
    told = run(
        f"""
        install_flash_attn_alias()
        for line in {NOT_SERVED}:
            try:
                exec(line)
            except ImportError as error:
                print(error)
        """
    ).splitlines()
    assert len(told) == len(NOT_SERVED)
    for line in told:
        assert "is not served by packing_ops' alias of flash_attn" in line
        assert "install flash-attn itself for the rest" in line


@needs_absence
def test_removed_alias_leaves_nothing():
    run(
        """
        import importlib.metadata, importlib.util, sys
        finders = list(sys.meta_path)
        revert_flash_attn_alias()
        assert sys.meta_path == finders
        for _ in range(2):
            install_flash_attn_alias()
            assert sys.meta_path != finders
            revert_flash_attn_alias()
            assert sys.meta_path == finders
            assert not [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]
            assert importlib.util.find_spec("flash_attn") is None
            assert "flash_attn" not in importlib.metadata.packages_distributions()
            try:
                importlib.metadata.version("flash-attn")
            except importlib.metadata.PackageNotFoundError:
                pass
            else:
                raise AssertionError("the distribution is still there")
        """
    )


def test_a_real_package_stays(tmp_path):
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.7.4'\n")
    run(
        """
        import sys, warnings
        finders, modules = list(sys.meta_path), set(sys.modules)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert install_flash_attn_alias() is False
        assert "flash_attn is installed and stays in use" in str(said[0].message)
        assert said[0].filename == "<string>"
        assert sys.meta_path == finders
        assert "flash_attn" not in sys.modules
        import flash_attn
        assert flash_attn.__version__ == "2.7.4"
        revert_flash_attn_alias()
        assert sys.modules["flash_attn"] is flash_attn
        """,
        tmp_path,
    )


# --- transformers ---


@transformers_installed
@needs_absence
def test_transformers_looks_again():
    """Its checks are remembered, and without a CUDA device they end in "no" whatever is installed."""
    run(
        """
        from transformers.modeling_flash_attention_utils import FLASH_ATTENTION_COMPATIBILITY_MATRIX as matrix
        from transformers.utils import import_utils as checks
        checks.is_torch_cuda_available = lambda: True
        mapping = vars(checks).setdefault("PACKAGE_DISTRIBUTION_MAPPING", {})  # where 5.17 looks, newer ones have none
        found = lambda: (
            checks.is_flash_attn_2_available(),
            checks.is_flash_attn_greater_or_equal("2.3.3"),
            matrix[2]["pkg_availability_check"](),
        )
        assert found() == (False, False, False), found()
        install_flash_attn_alias()
        assert found() == (True, True, True), found()
        assert mapping["flash_attn"] == ["flash-attn"]
        assert not checks.is_flash_attn_greater_or_equal("3.0.0")
        assert not checks.is_flash_attn_3_available() and not checks.is_flash_attn_4_available()
        revert_flash_attn_alias()
        assert found() == (False, False, False), found()
        assert "flash_attn" not in mapping
        """
    )


@transformers_installed
@needs_absence
def test_transformers_runs_a_model_through_the_alias():
    """flash_attention_2 as transformers calls it, on the CPU: its check for a device is the only thing replaced."""
    run(
        """
        import torch
        import transformers.modeling_flash_attention_utils as host
        from transformers import MistralConfig, MistralForCausalLM
        from transformers.utils import import_utils as checks
        checks.is_torch_cuda_available = lambda: True
        install_flash_attn_alias()
        torch.manual_seed(0)
        config = MistralConfig(
            vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, sliding_window=4, attn_implementation="eager",
        )
        model = MistralForCausalLM(config)
        ids = torch.randint(0, 50, (2, 9))
        left, right = torch.ones(2, 9, dtype=torch.long), torch.ones(2, 9, dtype=torch.long)
        left[0, :3], right[1, 6:] = 0, 0

        def results(implementation, mask, **more):
            model.config._attn_implementation = implementation
            model.zero_grad()
            logits = model(ids if mask is not None else ids.view(1, -1), attention_mask=mask, use_cache=False, **more).logits
            real = logits[mask.bool()] if mask is not None else logits
            real.square().mean().backward()
            return [real.detach().reshape(-1, 50), *(p.grad.clone() for p in model.parameters())]

        def assert_equal(actual, expected):
            for ours, theirs in zip(actual, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

        for mask in (left, right, torch.ones_like(left)):
            assert_equal(results("flash_attention_2", mask), results("eager", mask))
        each = results("eager", torch.ones_like(left))
        lengths = torch.tensor([0, 9, 18], dtype=torch.int32)
        explicit = dict(cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, max_length_q=9, max_length_k=9)
        positions = torch.arange(9).repeat(2)[None]
        assert_equal(results("flash_attention_2", None, position_ids=positions), each)
        assert_equal(results("flash_attention_2", None, position_ids=positions, **explicit), each)
        assert host._flash_varlen_fn.__module__ == "packing_ops.varlen.flash_attn"
        assert host._unpad_fn.__module__ == "packing_ops.padding"

        model.eval()
        options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
        model.config._attn_implementation = "eager"
        stock = model.generate(ids, attention_mask=left, **options)
        model.config._attn_implementation = "flash_attention_2"
        assert torch.equal(model.generate(ids, attention_mask=left, **options), stock)
        """
    )


@transformers_installed
@needs_absence
def test_remote_code_of_a_model_runs(tmp_path):
    """A model folder with code: transformers imports what that code imports before it runs it."""
    (tmp_path / "modeling_own.py").write_text(
        textwrap.dedent(
            """
            import torch
            from flash_attn import flash_attn_varlen_func
            from flash_attn.bert_padding import pad_input, unpad_input
            from flash_attn.layers.rotary import apply_rotary_emb
            from transformers import PretrainedConfig, PreTrainedModel

            class OwnConfig(PretrainedConfig):
                model_type = "own"

            class OwnModel(PreTrainedModel):
                config_class = OwnConfig

                def forward(self, q, cos, sin, mask):
                    q = apply_rotary_emb(q, cos, sin)
                    q, indices, cu_seqlens, longest, *_ = unpad_input(q, mask)
                    out = flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, longest, longest, causal=True)
                    return pad_input(out, indices, *mask.shape)
            """
        )
    )
    names = '"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"'
    (tmp_path / "config.json").write_text(f'{{"model_type": "own", "auto_map": {{{names}}}}}')
    run(
        f"""
        import os
        os.environ["HF_HOME"] = {str(tmp_path / "home")!r}
        import torch
        from transformers import AutoConfig, AutoModel

        def model():
            config = AutoConfig.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)
            return AutoModel.from_config(config, trust_remote_code=True)

        try:
            model()
        except ImportError as error:
            assert "flash_attn" in str(error)
        else:
            raise AssertionError("nothing asked for flash_attn")
        install_flash_attn_alias()
        q, mask = torch.randn(2, 4, 2, 8), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
        angles = torch.arange(4)[:, None] / 10 ** torch.arange(4)
        out = model()(q, angles.cos(), angles.sin(), mask)
        for row, length in ((0, 3), (1, 4)):
            x1, x2 = q[row, :length].chunk(2, -1)
            cos, sin = angles.cos()[:length, None], angles.sin()[:length, None]
            x = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).transpose(0, 1)
            expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(0, 1)
            torch.testing.assert_close(out[row, :length], expected, rtol=1e-5, atol=1e-5)
        assert not out[0, 3:].any()
        """
    )


# --- hosts themselves, where they are installed ---


def needs(host):
    return pytest.mark.skipif(importlib.util.find_spec(host) is None, reason=f"needs {host}")


@needs_absence
@needs("verl")
def test_verl_itself():
    """Its log-probabilities over rows without padding are those over padded rows, with gradients."""
    run(
        """
        import torch
        install_flash_attn_alias()
        from verl.utils.attention_utils import index_first_axis, rearrange, unpad_input
        from verl.utils.torch_functional import log_probs_from_logits_response, log_probs_from_logits_response_rmpad
        torch.manual_seed(0)
        mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]])
        ids, logits = torch.randint(0, 11, (3, 6)), torch.randn(3, 6, 11, requires_grad=True)
        packed, indices, *_ = unpad_input(logits, mask)
        positions = rearrange((mask.cumsum(1) - 1).unsqueeze(-1), "b s ... -> (b s) ...")
        assert index_first_axis(positions, indices)[:, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
        real = (mask[:, -3:] * mask[:, -4:-1]).bool()
        ours = log_probs_from_logits_response_rmpad(ids, mask, packed, 3)[real]
        theirs = log_probs_from_logits_response(ids, logits, 3)[real]
        gradients = [torch.autograd.grad(values.sum(), logits, retain_graph=True)[0] for values in (ours, theirs)]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
        """
    )


@needs_absence
@needs("skyrl")
def test_skyrl_itself():
    """Its model without padding gives the log-probabilities, entropies and gradients of its padded model."""
    run(
        """
        import typing, torch, typing_extensions
        typing.TypedDict = typing_extensions.TypedDict  # what its settings need below Python 3.12
        from packing_ops.integrations.transformers import register
        from transformers import Qwen2Config, Qwen2ForCausalLM
        from transformers.utils import import_utils as checks
        checks.is_torch_cuda_available = lambda: True
        register()
        install_flash_attn_alias()
        from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, attn_implementation="eager",
        ))
        mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]])
        ids, real = torch.randint(0, 50, (3, 6)), (mask[:, -3:] * mask[:, -4:-1]).bool()

        def results(implementation, packed):
            model.config._attn_implementation = implementation
            model.zero_grad()
            wrapper = HFModelWrapper(model, use_flash_attention_2=packed, remove_microbatch_padding=packed)
            log_probs, out = wrapper(ids, 3, attention_mask=mask, return_output=True, compute_entropy=True)
            found = [log_probs[real], out["entropy"][mask.bool()]]
            sum(values.sum() for values in found).backward()
            return found + [parameter.grad.clone() for parameter in model.parameters()]

        expected = results("eager", False)
        for implementation in ("flash_attention_2", "packing_ops"):
            for ours, theirs in zip(results(implementation, True), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        """
    )
