"""Whole layers and encoders, compiled, exported, mapped, cast."""

from functools import partial

import pytest
import torch
from layer_cases import LAYERS, close, make_layer, normal
from torch import nn
from torch.export import Dim
from torch.func import functional_call, stack_module_state, vmap

from coulomb.attention.encoder.encoder import EncoderSettings, KernelEncoder
from coulomb.attention.layers.kernel import KernelAttention

SETTINGS = EncoderSettings(20, 3, n_layers=1, width=8, ffn_width=16, max_length=32)
ATTENTIONS = {
    "softmaxfeat": partial(KernelAttention, n_features=16),
    "shared cos2": partial(
        KernelAttention, n_features=16, feature_map="cos2", qkv="shared"
    ),
    "causal favor": partial(
        KernelAttention, n_features=16, feature_map="favor", causal=True
    ),
}
every_attention = pytest.mark.parametrize(
    "attention", ATTENTIONS.values(), ids=ATTENTIONS.keys()
)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


def make_encoder(attention=ATTENTIONS["softmaxfeat"], seed=0, **settings):
    return KernelEncoder(SETTINGS, attention, generator=seed, **settings).double()


def make_batch(batch=2, length=7):
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, 20, (batch, length), generator=generator)
    mask = (
        torch.arange(length).expand(batch, -1) < length - torch.arange(batch)[:, None]
    )
    return tokens, mask


@every_attention
def test_encoder_compiles_into_one_graph(attention):
    model, batch = make_encoder(attention).eval(), make_batch()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    out, expected = compiled(*batch), model(*batch)
    close(out, expected)
    parameters = [p for p in model.parameters() if p.requires_grad]
    theirs, ours = (
        torch.autograd.grad(x.square().sum(), parameters) for x in (out, expected)
    )
    for a, b in zip(theirs, ours, strict=True):
        close(a, b, 1e-8)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_compiles_inside_torch(name):
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).double()
    layer.self_attn = make_layer(name)
    x, padding = normal(2, 6, 8), torch.arange(6).expand(2, -1) >= 4
    layer.eval()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    out = compiled(x, src_key_padding_mask=padding)
    close(out, layer(x, src_key_padding_mask=padding))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_layer_compiles_with_inductor():
    layer, x = make_layer("kernel").eval(), normal(2, 7, 8)
    padding = torch.arange(7).expand(2, -1) >= 5
    with torch.no_grad():
        try:
            out = torch.compile(layer)(x, x, x, padding, need_weights=False)[0]
        except torch._inductor.exc.InductorError as error:
            pytest.skip(f"no compiler: {error}")
        close(out, layer(x, x, x, padding, need_weights=False)[0])


@every_attention
def test_encoder_exports_with_symbolic_lengths(attention):
    model = make_encoder(attention).eval()
    shape = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=32)}
    program = torch.export.export(
        model, make_batch(), dynamic_shapes={"token_ids": shape, "key_mask": shape}
    )
    for batch in (make_batch(), make_batch(3, 12), make_batch(1, 32)):
        close(program.module()(*batch), model(*batch))


@every_attention
def test_two_encoders_at_once(attention):
    models = [make_encoder(attention, seed).eval() for seed in (0, 1)]
    parameters, buffers = stack_module_state(models)
    batch = make_batch()

    def run(parameters, buffers):
        return functional_call(models[0], (parameters, buffers), batch)

    out = vmap(run)(parameters, buffers)
    for i, model in enumerate(models):
        close(out[i], model(*batch))


def test_particles_as_arguments():
    """How Phase A evaluates a model: a function of the particles, differentiable."""
    model, batch = make_encoder().eval(), make_batch()
    name = "layers.0.attention.particles"
    positions = (2 * model.get_parameter(name).detach()).requires_grad_()
    out = functional_call(model, {name: positions}, batch)
    assert not torch.equal(out, model(*batch))
    (grad,) = torch.autograd.grad(out.square().sum(), positions)
    assert grad.abs().max() > 0
    (again,) = torch.func.grad(
        lambda p: functional_call(model, {name: p[0]}, batch).square().sum()
    )((positions.detach(),))
    close(grad, again, 1e-8)


def test_encoder_under_autocast():
    model, batch = make_encoder().float(), make_batch()
    expected = model.eval()(*batch)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(*batch)
    assert out.dtype == torch.bfloat16
    close(out.float(), expected, 0.05)
    out.float().square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(grad.isfinite().all() for grad in gradients)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["softmaxfeat", "shared cos2", "causal favor"])
def test_encoder_in_onnx_runtime(name, tmp_path):
    reason = "onnxruntime and onnxscript are not installed"
    pytest.importorskip("onnxscript", reason=reason)
    onnxruntime = pytest.importorskip("onnxruntime", reason=reason)
    model = make_encoder(ATTENTIONS[name]).float().eval()
    shape = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=32)}
    program = torch.onnx.export(
        model,
        make_batch(),
        dynamo=True,
        dynamic_shapes={"token_ids": shape, "key_mask": shape},
        verbose=False,
    )
    program.save(tmp_path / "encoder.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "encoder.onnx")
    for tokens, mask in (make_batch(), make_batch(3, 12)):
        (out,) = session.run(
            None, {"token_ids": tokens.numpy(), "key_mask": mask.numpy()}
        )
        close(torch.from_numpy(out), model(tokens, mask).detach(), 1e-5)
