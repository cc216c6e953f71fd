"""Models of transformers: four families, saved, loaded, piped and trained."""

import subprocess
import sys
from itertools import product

import pytest
import torch
from linearise_cases import (
    FAMILIES,
    QUICK,
    batch_of,
    bert_tokenizer,
    make_texts,
    tiny_model,
    tokenizer_for,
)

from coulomb._support.errors import FileFormatError, ParameterError
from coulomb.linearise import (
    linearise,
    linearised_heads,
    load_pretrained,
    register,
)
from coulomb.linearise.heads import softmax_rows
from coulomb.linearise.huggingface import ATTENTION, Int8Linear
from coulomb.linearise.teacher import (
    PROJECTIONS,
    Recording,
    Stack,
    longest_text,
    n_positions,
    with_positions,
)

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    family = request.param
    model = tiny_model(family)
    fast = linearise(model, tokenizer_for(family), make_texts(), **QUICK)
    return family, model, fast


@torch.no_grad()
def hidden(model, batch):
    return model(**batch).last_hidden_state


def test_particles_are_learned(case):
    _, _, fast = case
    summary = fast.linearise_summary
    assert sum(summary.after) < sum(summary.before)
    assert sum(summary.after) < sum(summary.random)
    assert summary.cosine > summary.cosine_random


def test_model_is_one_of_transformers(case):
    family, model, fast = case
    assert isinstance(fast, type(model))
    assert type(fast).__name__ == f"Linearised{type(model).__name__}"
    assert fast.config.model_type == f"coulomb-{family}"
    assert fast.config.coulomb["n_features"] == 8
    assert model.config.model_type == family
    assert model.config._attn_implementation != ATTENTION


def test_padding_is_not_seen(case):
    """The mask function is registered too: without it padding would be attended to."""
    family, _, fast = case
    batch = batch_of(family)
    real = batch["attention_mask"].bool()
    whole = hidden(fast, batch)
    for row in range(len(real)):
        n = int(real[row].sum())
        alone = hidden(fast, {k: v[row : row + 1, :n] for k, v in batch.items()})
        torch.testing.assert_close(whole[row, :n], alone[0], rtol=1e-4, atol=1e-5)


def test_round_trip(case, tmp_path):
    family, _, fast = case
    fast.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    batch = batch_of(family)
    expected = hidden(fast, batch)
    for model in (
        load_pretrained(tmp_path),
        transformers.AutoModel.from_pretrained(tmp_path),
        type(fast).from_pretrained(tmp_path),
    ):
        assert type(model) is type(fast)
        torch.testing.assert_close(hidden(model, batch), expected)


def test_all_layers_exact_is_the_model_itself(case):
    family, model, _ = case
    kept = linearise(
        model, tokenizer_for(family), make_texts(), keep_exact=[0, 1], **QUICK
    )
    batch = batch_of(family)
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(
        hidden(kept, batch)[real], hidden(model, batch)[real], rtol=1e-4, atol=1e-5
    )


def test_attention_rows_can_be_seen(case):
    family, _, fast = case
    if family == "mpnet":
        with torch.no_grad():
            out = fast(**batch_of(family), output_attentions=True)
        rows = out.attentions[0]
        torch.testing.assert_close(rows.sum(dim=-1), torch.ones_like(rows[..., 0]))
    heads = linearised_heads(fast)
    assert len(heads) == 2
    assert "n_features=8" in repr(heads[0])


def test_recorded_rows_are_the_models_attention(case):
    family, _, _ = case
    model = tiny_model(family)
    model.config._attn_implementation_internal = "eager"
    batch = batch_of(family)
    with torch.no_grad():
        expected = model(**batch, output_attentions=True).attentions
    stack = Stack(model)
    inputs = []
    for site in stack.sites:
        site.module.register_forward_pre_hook(
            lambda _, arguments, keywords: inputs.append(
                keywords.get("hidden_states", *arguments[:1])
            ),
            with_kwargs=True,
        )
    real = batch["attention_mask"].bool()
    for number, (rows,) in enumerate(Recording(stack, [batch]).layers()):
        module = stack.sites[number].module
        names = PROJECTIONS[type(module).__name__]
        if family != "modernbert":  # which turns them by their positions
            for kept, name in zip(rows[:3], names, strict=True):
                made = getattr(module, name)(inputs[number])
                split = made.unflatten(-1, (2, -1)).transpose(1, 2)
                torch.testing.assert_close(kept, split)
        ours = softmax_rows(rows.q, rows.k, rows.key_mask, rows.bias)
        chosen = real[:, None, :].expand(-1, 2, -1)
        torch.testing.assert_close(
            ours[chosen],
            expected[stack.sites[number].block][chosen],
            rtol=1e-4,
            atol=1e-6,
        )


def test_gradients_reach_the_weights_and_unfrozen_particles(case):
    family, _, fast = case
    heads = linearised_heads(fast)[0]
    heads.particles.requires_grad_(True)
    try:
        fast(**batch_of(family)).last_hidden_state.square().mean().backward()
        assert heads.particles.grad.abs().sum() > 0
        missing = [
            name
            for name, p in fast.named_parameters()
            if p.requires_grad and p.grad is None and "pooler" not in name
        ]
        # The last query bias of MPNet's positions is not used any more.
        assert all("relative_attention_bias" in name for name in missing)
    finally:
        heads.particles.requires_grad_(False)
        fast.zero_grad()


def test_task_heads_are_kept(tmp_path):
    model = tiny_model("roberta", "AutoModelForSequenceClassification")
    fast = linearise(model, tokenizer_for("roberta"), make_texts(), **QUICK)
    fast.save_pretrained(tmp_path)
    again = load_pretrained(tmp_path, task="AutoModelForSequenceClassification")
    batch = batch_of("roberta")
    with torch.no_grad():
        torch.testing.assert_close(again(**batch).logits, fast(**batch).logits)


def test_heads_of_one_layer_can_be_exact(tmp_path):
    model = tiny_model("bert")
    fast = linearise(
        model, tokenizer_for("bert"), make_texts(), keep_exact=[(1, 0)], **QUICK
    )
    fast.save_pretrained(tmp_path)
    again = load_pretrained(tmp_path)
    assert [heads.exact_heads for heads in linearised_heads(again)] == [(), (0,)]
    batch = batch_of("bert")
    torch.testing.assert_close(hidden(again, batch), hidden(fast, batch))


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_short_texts_are_embedded_as_before(family, tmp_path):
    model, tokenizer = tiny_model(family), tokenizer_for(family)
    fast = linearise(model, tokenizer, make_texts(), **QUICK | {"exact_length": 20})
    fast.save_pretrained(tmp_path)
    again = load_pretrained(tmp_path)
    # MPNet's bias between any two tokens would have to be computed for all texts.
    expected = 0 if family == "mpnet" else 20
    assert {heads.exact_length for heads in linearised_heads(again)} == {expected}
    ids = torch.full((2, 20), 7)
    with torch.no_grad():
        ours, theirs = (m(input_ids=ids).last_hidden_state for m in (again, model))
    assert torch.allclose(ours, theirs, atol=1e-5) == (family == "bert")
    if family == "bert":
        assert "at most 20 attend by softmax" in (tmp_path / "README.md").read_text()


def test_pipeline(tmp_path):
    tokenizer = bert_tokenizer(tmp_path)
    fast = linearise(tiny_model("bert"), tokenizer, make_texts(), **QUICK)
    pipe = transformers.pipeline("feature-extraction", model=fast, tokenizer=tokenizer)
    text = make_texts(1, seed=9)[0]
    batch = tokenizer([text], return_tensors="pt")
    expected = hidden(fast, dict(batch))
    torch.testing.assert_close(torch.tensor(pipe(text)), expected)


def test_trainer(tmp_path):
    pytest.importorskip("accelerate")
    model = tiny_model("bert", "AutoModelForSequenceClassification")
    fast = linearise(model, tokenizer_for("bert"), make_texts(), **QUICK)
    before = fast.classifier.weight.detach().clone()
    particles = linearised_heads(fast)[0].particles.clone()
    batch = batch_of("bert", 8)
    rows = [
        {"labels": i % 2, **{name: value[i] for name, value in batch.items()}}
        for i in range(8)
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(fast, arguments, train_dataset=rows)
    result = trainer.train()
    assert result.global_step == 2
    assert not torch.equal(fast.classifier.weight, before)
    assert torch.equal(linearised_heads(fast)[0].particles, particles)


class TestRefusals:
    def test_other_families_by_name(self):
        config = transformers.AlbertConfig(
            vocab_size=64,
            embedding_size=8,
            hidden_size=16,
            num_attention_heads=2,
            intermediate_size=16,
        )
        model = transformers.AlbertModel(config)
        expected = "MPNet, RoBERTa, ModernBERT, NomicBERT.* got AlbertModel"
        with pytest.raises(ParameterError, match=expected):
            linearise(model, tokenizer_for("bert"), make_texts())

    def test_a_text_that_the_tokenizer_panics_on(self):
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        inner = Tokenizer(models.WordLevel({"a": 0, "[PAD]": 1}, unk_token="a"))
        inner.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=inner, pad_token="[PAD]"
        )
        texts = [*make_texts(), "a" * 60 + "b"]
        with pytest.raises(ParameterError, match=r"it fails on 'aaa.*Leave it out"):
            linearise(tiny_model("bert"), tokenizer, texts, **QUICK)

    def test_decoders(self):
        model = tiny_model("bert")
        model.config.is_decoder = True
        with pytest.raises(ParameterError, match="is_decoder=True"):
            linearise(model, tokenizer_for("bert"), make_texts())

    def test_a_model_twice(self, case):
        family, _, fast = case
        with pytest.raises(ParameterError, match="linearised already"):
            linearise(fast, tokenizer_for(family), make_texts())

    def test_attention_of_models_that_were_not_linearised(self, tmp_path):
        register()
        tiny_model("bert").save_pretrained(tmp_path)
        load = transformers.AutoModel.from_pretrained
        later = load(tmp_path)
        later.set_attn_implementation(ATTENTION)
        for model in (later, load(tmp_path, attn_implementation=ATTENTION)):
            with pytest.raises(ParameterError, match=r"coulomb\.linearise\.linearise"):
                hidden(model, batch_of("bert"))

    def test_folders_of_other_things(self, tmp_path):
        with pytest.raises(FileFormatError, match=r"no config.json"):
            load_pretrained(tmp_path)
        tiny_model("bert").save_pretrained(tmp_path)
        with pytest.raises(FileFormatError, match="its type is 'bert'"):
            load_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_padding_is_left_out_of_batches_that_are_full_of_it(family):
    fast = linearise(tiny_model(family), tokenizer_for(family), make_texts(), **QUICK)
    batch = batch_of(family)
    real = batch["attention_mask"].bool()
    assert real.float().mean() < 0.9
    seen = []
    first = next(m for m in fast.modules() if isinstance(m, torch.nn.LayerNorm))
    handle = first.register_forward_hook(lambda _, x, out: seen.append(out.shape))
    with torch.no_grad():
        packed = fast(**batch)
    padded = fast(**batch)  # with gradients nothing is packed
    handle.remove()
    assert seen[0][:2] == (1, int(real.sum()))
    assert seen[1][:2] == real.shape
    torch.testing.assert_close(
        packed.last_hidden_state[real], padded.last_hidden_state[real],
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip
    torch.testing.assert_close(
        packed.pooler_output, padded.pooler_output, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "mpnet"])
def test_longer_texts_have_positions_and_shorter_ones_keep_theirs(family):
    model = tiny_model(family)
    count = longest_text(model)
    longer = with_positions(model, 100)
    assert n_positions(longer) == 100
    short = batch_of(family)
    torch.testing.assert_close(hidden(longer, short), hidden(model, short))
    text = {"input_ids": torch.full((1, 100), 7)}
    made = hidden(longer, {**text, "attention_mask": torch.ones(1, 100)})
    assert made.shape == (1, 100, 16)
    owner = next(m for m in longer.modules() if hasattr(m, "position_embeddings"))
    table = owner.position_embeddings.weight[-100:]
    torch.testing.assert_close(table[count:], table[: 100 - count])


def test_rotary_models_need_no_positions():
    model = tiny_model("modernbert")
    assert with_positions(model, 100) is model
    assert n_positions(model) is None


@pytest.mark.parametrize("kind", ["nomic_bert", "gte", "jina_embeddings_v3"])
def test_rotary_models_with_exact_heads_are_the_models_themselves(kind, tmp_path):
    config = transformers.CONFIG_MAPPING[kind](
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, initializer_range=0.5, pad_token_id=0, bos_token_id=2,
        eos_token_id=3, max_position_embeddings=40,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).eval()
    batch = batch_of("bert")
    real = batch["attention_mask"].bool()
    given = model, tokenizer_for("bert"), make_texts()
    kept = linearise(*given, keep_exact=[0, 1], **QUICK)
    torch.testing.assert_close(
        hidden(kept, batch)[real], hidden(model, batch)[real], rtol=1e-4, atol=1e-5
    )
    fast = linearise(*given, **QUICK)
    assert sum(fast.linearise_summary.after) < sum(fast.linearise_summary.before)
    fast.save_pretrained(tmp_path)
    again = hidden(load_pretrained(tmp_path), batch)
    torch.testing.assert_close(again[real], hidden(fast, batch)[real])


def test_texts_beyond_the_positions_are_refused(tmp_path):
    fast = linearise(tiny_model("bert"), tokenizer_for("bert"), make_texts(), **QUICK)
    fast.save_pretrained(tmp_path)
    for model in (fast, load_pretrained(tmp_path)):
        with pytest.raises(ParameterError, match=r"at most 40 tokens.*got 41"):
            model(input_ids=torch.ones(1, 41, dtype=torch.long))


def test_lengths_know_the_padding_position():
    assert longest_text(tiny_model("bert")) == 40
    assert longest_text(tiny_model("roberta")) == 38
    assert longest_text(torch.nn.Linear(1, 1)) == 512


def test_transformers_is_imported_only_when_needed():
    code = (
        "import sys, coulomb.linearise; print('transformers' in sys.modules)\n"
        "sys.modules['transformers'] = None\n"
        "from coulomb.linearise import register\n"
        "try:\n    register()\nexcept ValueError as error:\n    print(error)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.startswith("False")
    assert "pip install 'coulomb[hf]'" in out


class TestInt8:
    def test_products_are_those_of_rounded_numbers(self):
        source = torch.Generator().manual_seed(0)
        plain = torch.nn.Linear(24, 10)
        layer = Int8Linear(24, 10)
        layer.load_state_dict(plain.state_dict())
        x = torch.randn(2, 7, 24, generator=source)
        x[0, 0] = 0
        with torch.no_grad():
            found, wide = layer(x), layer(x.bfloat16())
            expected = torch.zeros(2, 7, 10, dtype=torch.float64)
            for place in product(range(2), range(7), range(10)):
                row, weight = x[place[:2]].double(), plain.weight[place[2]].double()
                s, t = (v.abs().max().clamp_min(1e-30) / 127 for v in (row, weight))
                products = (row / s).round() * (weight / t).round()
                expected[place] = s * t * products.sum() + plain.bias[place[2]]
            layer.weight.mul_(2)
            again = layer(x) - layer.bias
        torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)
        assert wide.dtype == torch.bfloat16
        torch.testing.assert_close(again, 2 * (found - layer.bias))  # it is not stale

    def test_gradients_are_those_of_the_linear_layer(self):
        plain, layer = torch.nn.Linear(8, 4), Int8Linear(8, 4)
        layer.load_state_dict(plain.state_dict())
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(layer(x), plain(x))
        for each in (plain, layer):
            each(x).square().sum().backward()
        torch.testing.assert_close(layer.weight.grad, plain.weight.grad)

    @pytest.mark.parametrize("family", ["bert", "modernbert"])
    def test_models_are_saved_and_loaded_with_it(self, family, tmp_path):
        given = tiny_model(family), tokenizer_for(family), make_texts()
        fast = linearise(*given, int8=True, **QUICK)
        kinds = [type(m) for m in Stack(fast).blocks.modules()]
        assert Int8Linear in kinds
        assert torch.nn.Linear not in kinds
        summary = fast.linearise_summary
        assert summary.cosine_int8 == pytest.approx(summary.cosine, abs=0.02)
        assert f"eight bits {summary.cosine_int8:.4f}" in str(summary)
        batch = batch_of(family)
        exact = fast(**batch).last_hidden_state.detach()
        rough = hidden(fast, batch)
        real = batch["attention_mask"].bool()
        assert 0 < (rough - exact)[real].norm() / exact[real].norm() < 0.1
        fast.save_pretrained(tmp_path)
        again = load_pretrained(tmp_path)
        torch.testing.assert_close(hidden(again, batch)[real], rough[real])

    def test_torch_encoders(self):
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        table = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))

        def tokenize(texts):
            batch = tokenizer_for("bert")(texts)
            padding = ~batch["attention_mask"].bool()
            return {"src": table[batch["input_ids"]], "src_key_padding_mask": padding}

        fast = linearise(model, tokenize, make_texts(), int8=True, **QUICK)
        assert fast.linearise_summary.cosine_int8 > 0.9
