"""Saved models in fresh processes: where people load encoders, and what comes along."""

import http.server
import json
import os
import subprocess
import sys
import threading
from base64 import b64decode

import numpy as np
import pytest
import torch
from linearise_cases import QUICK, batch_of, bert_tokenizer, make_texts, tiny_model

from coulomb._support.errors import FileFormatError, ParameterError
from coulomb.attention import replace_attention
from coulomb.linearise import linearise, linearised_heads

transformers = pytest.importorskip("transformers")

TEXTS = ["abc def", "a longer text than that", "b"]
MODULES = [
    {"idx": number, "name": str(number), "path": path,
     "type": f"sentence_transformers.models.{kind}"}
    for number, (path, kind) in enumerate(
        {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}.items()
    )
]  # fmt: skip
POOLING = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}
PROMPTS = {"prompts": {"query": "find: "}, "default_prompt_name": None}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A sentence encoder as people have it: tokenizer, pooling, norm and prompts."""
    folder = tmp_path_factory.mktemp("source")
    bert_tokenizer(folder).save_pretrained(folder)
    tiny_model("bert").save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    for name, content in {
        "modules.json": MODULES,
        "1_Pooling/config.json": POOLING,
        "sentence_bert_config.json": {"max_seq_length": 12, "do_lower_case": False},
        "config_sentence_transformers.json": PROMPTS,
    }.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nA card.\n")
    return folder


@pytest.fixture(scope="module")
def saved(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model = transformers.AutoModel.from_pretrained(source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    fast = linearise(model, tokenizer, make_texts(), **QUICK)
    fast.save_pretrained(folder)
    return folder, fast, tokenizer


def unit_means(model, tokenizer):
    """What the modules of the source make of hidden states, and of 12 tokens."""
    options = {"truncation": True, "max_length": 12, "padding": True}
    batch = tokenizer(TEXTS, return_tensors="pt", **options)
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(dim=1), dim=-1)


def run_fresh(code, *arguments, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip


LOADS = """
import json, os, sys
import numpy as np
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer, pipeline

folder, texts, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]

def load(name, **options):
    encoder = SentenceTransformer(folder, **options)
    assert encoder.max_seq_length == 12, encoder.max_seq_length
    assert encoder.prompts["query"] == "find: ", encoder.prompts
    model = AutoModel.from_pretrained(folder, **options)
    assert type(model).__name__ == "LinearisedBertModel", type(model)
    pipe = pipeline("feature-extraction", model=folder, **options)
    batch = AutoTokenizer.from_pretrained(folder)(texts[0], return_tensors="pt")
    hidden = model(**batch).last_hidden_state.detach().numpy()
    numbers = {"embeddings": encoder.encode(texts), "piped": pipe(texts[0])}
    np.savez(f"{out}/{name}.npz", hidden=hidden, **numbers)

child = os.fork()  # two processes that have imported the libraries, and loaded nothing
if not child:
    import coulomb
    load("import")
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
try:
    SentenceTransformer(folder)
except ValueError as error:
    assert "trust_remote_code=True" in str(error), error
else:
    raise AssertionError("it loaded")
load("trust", trust_remote_code=True)
"""


@pytest.mark.slow
def test_fresh_processes_load_it(saved, tmp_path):
    """With an import of coulomb after transformers, and without it but with trust."""
    pytest.importorskip("sentence_transformers")
    folder, fast, tokenizer = saved
    texts = json.dumps(TEXTS)
    done = run_fresh(LOADS, folder, texts, tmp_path, HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        hidden = fast(**tokenizer(TEXTS[0], return_tensors="pt")).last_hidden_state
    expected = {"piped": hidden, "hidden": hidden}
    expected["embeddings"] = unit_means(fast, tokenizer)
    for way in ("import", "trust"):
        found = np.load(tmp_path / f"{way}.npz")
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)


def test_what_comes_along(saved, source):
    folder, fast, _ = saved
    for name in ("modules.json", "1_Pooling/config.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert not list(folder.rglob("*.bin"))
    card = (folder / "README.md").read_text()
    header = card.split("---")[1]
    assert f"base_model: {source.name}" in header
    assert "license: apache-2.0" in header
    assert "library_name: sentence-transformers" in header
    assert f"{fast.linearise_summary.cosine:.4f}" in card
    assert "at most 40 tokens" in card
    assert "import coulomb" in card


def test_a_copy_of_a_copy_keeps_its_card(saved, tmp_path):
    folder, _, _ = saved
    transformers.AutoModel.from_pretrained(folder).save_pretrained(tmp_path)
    for name in ("README.md", "modules.json", "modeling_coulomb.py"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_longer_texts_are_read_where_it_is_loaded(source, tmp_path):
    model = transformers.AutoModel.from_pretrained(source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    options = QUICK | {"max_length": 70, "steps": 2, "distil_steps": 1}
    fast = linearise(model, tokenizer, make_texts(), **options)
    fast.save_pretrained(tmp_path)
    assert model.config.max_position_embeddings == 40
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.model_max_length == 70
    known = json.loads((tmp_path / "sentence_bert_config.json").read_text())
    assert known == {"max_seq_length": 70, "do_lower_case": False}
    assert "at most 70 tokens" in (tmp_path / "README.md").read_text()
    text = again("a " * 90, truncation=True, return_tensors="pt")
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    assert loaded(**text).last_hidden_state.shape == (1, 70, 16)


def test_modules_outside_the_folder_are_refused(source, saved, tmp_path):
    _, fast, _ = saved
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "config.json").write_text("{}")
    (wrong / "modules.json").write_text(json.dumps([{"path": "../../secret"}]))
    before, fast.name_or_path = fast.name_or_path, str(wrong)
    try:
        with pytest.raises(FileFormatError, match="is not inside the model"):
            fast.save_pretrained(tmp_path / "out")
    finally:
        fast.name_or_path = before


class Hub(http.server.BaseHTTPRequestHandler):
    """The four calls of a hub that an upload makes, on a folder."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/create"):
            answer = {"url": f"{self.server.address}/someone/fast"}
        elif self.path.endswith("/validate-yaml"):
            answer = {"errors": [], "warnings": []}
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            answer = {"files": [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in files
            ]}  # fmt: skip
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    path = self.server.folder / line["value"]["path"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(b64decode(line["value"]["content"]))
            where = f"{self.server.address}/someone/fast/commit/1"
            answer = {"commitUrl": where, "commitOid": "1", "success": True}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_push_to_hub(saved, tmp_path, monkeypatch):
    """A client of the real library against a server that keeps files in a folder."""
    folder, _, _ = saved
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.folder = tmp_path / "hub"
    server.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    try:
        model = transformers.AutoModel.from_pretrained(folder)
        model.push_to_hub("someone/fast", token="hf_x")
    finally:
        server.shutdown()
        server.server_close()
    sent = {str(p.relative_to(server.folder)) for p in server.folder.rglob("*.*")}
    assert sent == {str(p.relative_to(folder)) for p in folder.rglob("*.*")}
    pushed = transformers.AutoModel.from_pretrained(server.folder)
    assert len(linearised_heads(pushed)) == 2
    assert (server.folder / "README.md").read_bytes() == (
        folder / "README.md"
    ).read_bytes()


def test_replaced_attention_round_trips(tmp_path):
    batch = batch_of("bert")
    for kind in ("AutoModel", "AutoModelForSequenceClassification"):
        model = tiny_model("bert", kind)
        names = replace_attention(model, n_features=8, feature_map="elu", generator=0)
        assert len(names) == 2
        model.save_pretrained(tmp_path / kind)
        auto = getattr(transformers, kind)
        again, told = auto.from_pretrained(tmp_path / kind, output_loading_info=True)
        assert not told["missing_keys"]
        assert not told["unexpected_keys"]
        assert type(again) is type(model)
        with torch.no_grad():
            ours, theirs = (m.eval()(**batch)[0] for m in (model, again))
        torch.testing.assert_close(ours, theirs)


def test_a_map_without_a_name_is_not_saved(tmp_path):
    from coulomb.features import CustomMap

    model = tiny_model("bert")
    replace_attention(model, feature_map=CustomMap(torch.matmul), n_features=8)
    with pytest.raises(ParameterError, match="`feature_map` must be given by its name"):
        model.save_pretrained(tmp_path)


def test_fresh_models_attend_with_drawn_particles(tmp_path):
    """Trained from scratch, saved, and loaded as what it is."""
    batch = batch_of("bert")
    config = tiny_model("bert").config
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation="coulomb")
    before = model(**batch).last_hidden_state
    assert len(linearised_heads(model)) == 2
    assert linearised_heads(model)[0].particles.std() > 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before.square().mean().backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        ours, theirs = (m.eval()(**batch).last_hidden_state for m in (model, again))
    assert not torch.equal(ours, before)
    real = batch["attention_mask"].bool()  # the loaded one leaves padding out
    torch.testing.assert_close(ours[real], theirs[real])


def test_fresh_models_of_a_saved_configuration(saved, tmp_path):
    """That of a softmax model, and of a linearised one, whose settings are kept."""
    tiny_model("bert").save_pretrained(tmp_path)
    for folder, count in ((tmp_path, 64), (saved[0], 8)):
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModel.from_config(
            config, attn_implementation="coulomb"
        ).eval()
        with torch.no_grad():
            assert model(**batch_of("bert")).last_hidden_state.isfinite().all()
        heads = linearised_heads(model)
        assert [h.particles.shape[1] for h in heads] == [count, count]
        assert all(h.particles.std() > 0.1 for h in heads)


def test_fresh_models_by_their_type():
    values = tiny_model("bert").config.to_diff_dict()
    values.pop("model_type")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "coulomb-bert", coulomb={"n_features": 4}, **values
    )
    model = transformers.AutoModel.from_config(config)
    heads = linearised_heads(model)
    assert [h.particles.shape[1] for h in heads] == [4, 4]
    assert all(h.particles.std() > 0.1 for h in heads)
    assert model(**batch_of("bert")).last_hidden_state.isfinite().all()
