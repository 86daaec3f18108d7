"""How a token gets dearer as the text gets longer: the decode rate behind 200 and 2,000 tokens, by kind of cache."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from fastdecode.benchmark_report import SHORT_DTYPE
from fastdecode.benchmark_rows import weights_name
from fastdecode.decoder import Decoder

CONTEXTS = (200, 2000)  # tokens before the ones that are timed
NEW_TOKENS = 32
REPEATS = 3


def context_rates(
    decoder: Decoder, texts: Mapping[int, str | None], new_tokens: int = NEW_TOKENS
) -> list[dict[str, Any]]:
    """Plain decoding with the cache in the weights' dtype and in int8, the two in turns; one object for each:

    `weights`, `kv_cache`, `decode_tokens_per_s` and `ms_per_token` by length of context, medians of several runs, and
    `ms_per_1000_rows`: what 1,000 cached tokens more add to a token, in ms. `texts`: per length, a text of exactly so
    many tokens; None where the context is too short for it, and then null is measured. No stop token ends a run.
    """
    decoders = {kind: _unstoppable(decoder, kind == "int8") for kind in ("float", "int8")}
    lengths = [n for n, text in texts.items() if text is not None and n + new_tokens <= decoder.max_seq_len]
    seconds: dict[tuple[str, int], list[float]] = {}
    for repeat in range(1 + REPEATS):  # the first to warm up
        for n in lengths:
            for kind, other in decoders.items():
                rate = _rate(other, texts[n], new_tokens)
                if repeat:
                    seconds.setdefault((kind, n), []).append(1 / rate)
    found = []
    for kind in decoders:
        ms = {n: 1e3 * median(seconds[kind, n]) if n in lengths else None for n in texts}
        known = [n for n in texts if ms[n] is not None]
        slope = (ms[known[-1]] - ms[known[0]]) / (known[-1] - known[0]) * 1e3 if len(known) > 1 else None
        precision = SHORT_DTYPE[decoder.model.norm.weight.dtype]
        found.append({
            "weights": weights_name(decoder.model),
            "kv_cache": "int8" if kind == "int8" else precision,
            "new_tokens": new_tokens,
            "decode_tokens_per_s": {str(n): None if t is None else 1e3 / t for n, t in ms.items()},
            "ms_per_token": {str(n): t for n, t in ms.items()},
            "ms_per_1000_rows": slope,
        })
    return found


def _unstoppable(decoder: Decoder, int8_cache: bool) -> Decoder:
    """A plain decoder of the same model for one text, which no stop token ends."""
    other = Decoder(
        decoder.model,
        decoder.tokenizer,
        stop_ids=(),
        max_seq_len=decoder.max_seq_len,
        compile=decoder.compile,
        program_folder=decoder.program_folder,
        int8_cache=int8_cache,
    )
    other.stop_ids = ()
    other.state.stop_ids.fill_(-1)
    return other


def _rate(decoder: Decoder, text: str, new_tokens: int) -> float:
    return decoder.generate(text, raw=True, max_new_tokens=new_tokens).stats["decode_tokens_per_s"]
