"""`coulomb linearise` and `coulomb kernels`: linear attention for saved encoders."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from coulomb._support.errors import ParameterError
from coulomb.cli.output import (
    Json,
    Seed,
    check_outputs,
    print_table,
    read_lines,
    resumable,
    say,
    whole_numbers,
    write_numbers,
)

if TYPE_CHECKING:
    from coulomb.linearise import KernelTable

Model = Annotated[
    Path, Argument(help="Folder of a BERT or its kin, ModernBERT or NomicBERT.")
]
Texts = Annotated[
    Path, Option(help="File with one unlabelled text per line, some hundred.")
]


def linearise(
    model_dir: Model,
    texts: Texts,
    out: Path = Option(help="Folder for the linearised model."),
    n_features: int = Option(64, min=1, help="Particles per head."),
    feature_map: str = Option(
        "softmaxfeat", help="softmaxfeat, favor, elu, softplus or sigmoid2."
    ),
    objective: str = Option("kl", help="kl, mse or alignment."),
    keep_exact: str = Option(
        "0",
        help="Heads that keep softmax: how many, or layer.head with commas between.",
    ),
    steps: int = Option(200, min=0, help="Steps of each layer."),
    distil_steps: int = Option(80, min=0, help="Steps of all layers together."),
    max_tokens: int = Option(
        30_000, min=64, help="Tokens to learn from: the memory it needs."
    ),
    max_length: int | None = Option(
        None, min=2, help="Tokens of the longest text; positions are repeated."
    ),
    window: int = Option(8, min=0, help="Tokens this near are compared exactly."),
    int8: bool = Option(False, help="Linear layers multiply eight-bit integers."),
    dry_run: bool = Option(False, help="Print what would be done, and end."),
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Give a pretrained encoder linear attention, learned without labels.

    Records what the attention layers see of your texts, places the particles of every
    head so that its attention rows agree with softmax, and saves the model in the same
    format. Prints what was kept on held-out text, against random features, and the
    speed on this machine. After `import coulomb` the result loads with `AutoModel` and
    `SentenceTransformer`; its model card says what else is needed. Interrupted, the
    same command goes on after the last layer that was learned, which is kept in
    `OUT.partial`. Several processes share the work under `torchrun`.

    **Examples**

    `coulomb linearise all-MiniLM-L6-v2 --texts sentences.txt --out minilm-linear`

    `coulomb linearise bert-base --texts reviews.txt --out fast --n-features 128
    --keep-exact 0.3,2.11`

    `torchrun --nproc-per-node 2 -m coulomb linearise bert-base --texts reviews.txt
    --out fast`
    """
    check_outputs(json, folder=out)
    from coulomb._support.archive import working_in, write_folder
    from coulomb._support.ranks import Ranks

    partial = Path(f"{out.resolve()}.partial")
    if out.is_dir() and any(out.iterdir()):
        if partial.is_dir():  # killed when its model was there already
            with working_in(partial):
                shutil.rmtree(partial)
            say(f"Model: {out}")
            return
        raise ParameterError(
            f"`out` must be a new or empty folder; {str(out)!r} holds files. Choose "
            "another, or remove it."
        )
    lines, kept = list(read_lines(texts)), _heads(keep_exact)
    model, tokenizer = _load(model_dir)
    from coulomb.attention.layers.replace import n_positions
    from coulomb.linearise import LineariseSettings, describe
    from coulomb.linearise import linearise as learn

    settings = LineariseSettings(
        n_features=n_features,
        feature_map=feature_map,
        objective=objective,
        steps=steps,
        distil_steps=distil_steps,
        max_tokens=max_tokens,
        max_length=max_length,
        window=window,
        int8=int8,
    )
    if dry_run:
        told = describe(model, tokenizer, lines, settings, seed=seed)
        say("\n".join(told))
        return
    if max_length is not None and max_length > (n_positions(model) or max_length):
        tokenizer.model_max_length = max_length
    ranks = Ranks.join()
    alone = working_in(partial) if ranks.writes else nullcontext()
    with resumable("The same command goes on from there."), alone:
        fast: Any = learn(
            model,
            tokenizer,
            lines,
            settings=settings,
            keep_exact=kept,
            seed=seed,
            checkpoint=partial / "layers.safetensors",
            ranks=ranks,
        )

        def save(folder: Path) -> None:
            fast.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        if ranks.writes:
            write_numbers(json, fast.linearise_summary.as_dict())
            write_folder(out, save)
            shutil.rmtree(partial)
    say(str(fast.linearise_summary))
    say(f"Model: {out}")


def kernels(
    model_dir: Model,
    texts: Texts,
    n_features: str = Option(
        "16,64,256", help="Numbers of features, with commas between."
    ),
    steps: int = Option(100, min=0, help="Steps of learned particles in each layer."),
    max_tokens: int = Option(12_000, min=64, help="Tokens recorded."),
    worst: int = Option(6, min=0, help="Heads to name."),
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Show how well features of one kind or another give softmax attention.

    Records real queries and keys of a model on your texts and prints, for each layer,
    the divergence KL(softmax row || row) on held-out text: learned particles, FAVOR+,
    orthogonal random features, elu + 1, and plain averaging, which knows nothing. Then
    the heads that are best kept exact.

    **Examples**

    `coulomb kernels all-MiniLM-L6-v2 --texts sentences.txt`

    `coulomb kernels bert-base --texts reviews.txt --n-features 32,128 --json out.json`
    """
    check_outputs(json)
    counts, lines = whole_numbers("n_features", n_features), list(read_lines(texts))
    model, tokenizer = _load(model_dir)
    from coulomb.linearise import kernel_table

    table = kernel_table(
        model,
        tokenizer,
        lines,
        n_features=counts,
        steps=steps,
        max_tokens=max_tokens,
        seed=seed,
    )
    _print(table, counts, worst)
    write_numbers(json, table.as_dict())


def _print(table: "KernelTable", counts: list[int], worst: int) -> None:
    rows = []
    for method in table.methods:
        errors = table.by_layer(method, "output_error")
        numbers = [*table.by_layer(method), sum(errors) / len(errors)]
        rows.append([method, *(f"{number:.3f}" for number in numbers)])
    layers = [f"layer {number}" for number in range(len(rows[0]) - 2)]
    title = "KL(softmax row || row), mean over heads, held-out text"
    print_table(title, ["features", *layers, "output error"], rows)
    if worst:
        method = f"learned {max(counts)}"
        heads = table.worst_heads(method, worst)
        named = ", ".join(f"{layer}.{head} ({kl:.2f})" for layer, head, kl in heads)
        say(f"Best kept exact (layer.head, KL of {method}): {named}")


def _heads(text: str) -> int | list[tuple[int, int]]:
    try:
        if "." not in text:
            return int(text)
        pairs = [part.split(".") for part in text.split(",")]
        return [(int(layer), int(head)) for layer, head in pairs]
    except ValueError as error:
        raise ParameterError(
            "`keep_exact` must be a number of heads, or layer.head with commas "
            f"between, such as 0.3,2.11; got {text!r}."
        ) from error


def _load(folder: Path) -> tuple[Any, Any]:
    from coulomb.linearise import huggingface

    with huggingface.reading(folder) as config:
        module = huggingface.transformers()
        name = (getattr(config, "architectures", None) or ["AutoModel"])[0]
        kind = getattr(module, name, None)
        if not hasattr(kind, "from_pretrained"):
            kind = module.AutoModel
        model = huggingface.load_weights(kind, folder)
        return model, huggingface.load_tokenizer(folder)
