"""Decoder: prompts in, streamed text out. The one loop around prefill and rounds."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastdecode.batch_sizes import BatchSizes
from fastdecode.detokenizer import StopStrings, TextStream
from fastdecode.drafters import Drafter, cache_rows_for
from fastdecode.drafters.root import RootOnly
from fastdecode.drafting import DraftPlan
from fastdecode.prefill import Prefill
from fastdecode.request import Request, Result, Span
from fastdecode.round import Round
from fastdecode.runner import Runner
from fastdecode.sampling import SamplingOptions
from fastdecode.state import TextState
from fastdecode.tokenizer import Tokenizer
from models.errors import InputError
from models.transformer import Transformer

Prompt = str | Sequence[Mapping[str, Any]]  # text, or a conversation of {"role", "content"} messages


class Piece(NamedTuple):
    """Text that one round added to the answer of prompt `index`; `result` comes with the last piece. `spans`: the same
    text, in parts that drafting won and parts that it did not."""

    index: int
    text: str
    result: Result | None
    spans: tuple[Span, ...] = ()


class Decoder:
    """Decodes up to `batch` texts at a time. Build it with `fastdecode.load`.

    The caches and the compiled programs live as long as the decoder; nothing is allocated that grows with the text.
    `int8_cache`: the model's keys and values are kept in int8; a drafter's own stay in float.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        stop_ids: Sequence[int],
        max_seq_len: int,
        batch: int = 1,
        compile: bool = True,
        drafter: Drafter | None = None,
        program_folder: Path | None = None,
        int8_cache: bool = False,
    ):
        self.model, self.tokenizer = model, tokenizer
        self.stop_ids = tuple(dict.fromkeys((*stop_ids, *tokenizer.stop_token_ids)))
        self.max_seq_len, self.batch = max_seq_len, batch
        self.compile, self.program_folder = compile, program_folder
        drafter = RootOnly() if drafter is None else drafter
        model.set_rotary(max_seq_len)
        rows = cache_rows_for(max_seq_len, drafter.n_nodes)
        device = model.norm.weight.device
        self.cache = model.new_cache(batch, rows, quantized=int8_cache)
        self.state = TextState(batch, max_seq_len, rows, self.stop_ids, device)
        vocab_size = min(tokenizer.vocab_size, model.config.vocab_size)
        self.runner = Runner(Round(model, self.cache, self.state, drafter, vocab_size), compile, program_folder)
        self.sizes = BatchSizes(self.runner, batch)
        self.prefill = Prefill(model, self.cache, drafter)
        self.cached_ids: list[list[int]] = [[] for _ in range(batch)]  # tokens whose keys and values are in each slot
        self.suggested_sampling: dict[str, Any] = {}  # of the checkpoint; never applied unless asked for
        self.plan: DraftPlan | None = None  # what was asked to draft, whatever tree was chosen for it
        self.busy = False
        self.postpones: Callable[[str], bool] = lambda program: False  # whether it is to run uncompiled for now
        self.compile_seconds: dict[str, float] = {}  # program -> seconds that its warm-up took

    def with_drafter(self, plan: DraftPlan, **how: Any) -> "Decoder":
        """A second decoder of the same model, with caches of its own and the drafter that `plan` builds; `how`: further
        arguments of its `build`."""
        vocab_size = self.runner.round.vocab_size
        other = Decoder(
            self.model,
            self.tokenizer,
            stop_ids=self.stop_ids,
            max_seq_len=self.max_seq_len,
            batch=self.batch,
            compile=self.compile,
            drafter=plan.build(self.model, self.max_seq_len, self.batch, vocab_size, **how),
            program_folder=self.program_folder,
            int8_cache=self.cache.quantized,
        )
        other.suggested_sampling, other.plan = self.suggested_sampling, self.plan
        return other

    def encode(self, prompt: Prompt, *, raw: bool = False, system: str | None = None) -> list[int]:
        """Token ids of a prompt: text goes through the chat template as a user's turn unless `raw`.

        Raises InputError when there is nothing to decode from, or no template for a conversation.
        """
        if isinstance(prompt, str) and raw:
            ids = self.tokenizer.encode(prompt)
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            ids = self.tokenizer.encode_chat(messages)
        if not ids and self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id]
        if not ids:
            raise InputError("The prompt is empty and this model has no BOS token to start from; give some text.")
        return ids

    def warm_up(self, options: SamplingOptions) -> None:
        """Compile (and on CUDA capture) the program that these options need, if that has not been done, and is not
        done by another process just now."""
        program = self.program_for(options)
        if program not in self.compile_seconds and not self.postpones(program):
            started = time.perf_counter()
            self.runner.warm_up(program)
            self.compile_seconds[program] = time.perf_counter() - started

    def warm_up_sizes(self, options: SamplingOptions) -> None:
        """Compile what these options need for smaller batches: minutes once, and then a batch can always shrink."""
        self.sizes.warm_up(self.program_for(options))

    def program_for(self, options: SamplingOptions) -> str:
        """The runner's program that these options need."""
        return "greedy" if options.plain_greedy else "sampled"

    def generate(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> Result | list[Result]:
        """Decode one prompt to a Result, or a list of prompts to a list of Results in the same order.

        Options are those of `run`. A conversation (a list of messages) counts as one prompt.
        """
        many = _is_list_of_prompts(prompts)
        results = {p.index: p.result for p in self.run(prompts if many else [prompts], **options) if p.result}
        return [results[i] for i in sorted(results)] if many else results[0]

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[str]:
        """Decode one prompt, yielding text as it becomes certain. Options are those of `run`."""
        for piece in self.run([prompt], **options):
            if piece.text:
                yield piece.text

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        raw: bool = False,
        system: str | None = None,
        first_index: int = 0,
        keep_prefix: bool = False,
        **sampling: Any,
    ) -> Iterator[Piece]:
        """Decode `prompts`, as many at a time as there are slots; a finished slot takes the next prompt.

        `max_new_tokens` at least 1; `stop`: strings that end an answer; `raw`: no chat template; `sampling`: the fields
        of SamplingOptions. The noise of prompt i is keyed by seed + first_index + i. `keep_prefix`: a conversation
        goes on, so what the cache holds of the prompt is not computed again. Every prompt is checked before any
        work; raises InputError for one that does not fit `max_seq_len`, and for options out of range.
        """
        options = SamplingOptions(**sampling)
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise InputError(f"max_new_tokens should be a whole number of at least 1, found {max_new_tokens!r}.")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        StopStrings(stop)
        encoded = [self.encode(p, raw=raw, system=system) for p in prompts]
        for ids in encoded:
            self._check(ids)
        return self._run(prompts, encoded, options, max_new_tokens, stop, raw, first_index, keep_prefix)

    def _check(self, ids: list[int]) -> None:
        if max(ids) >= self.model.config.vocab_size:
            raise InputError(
                f"The prompt has token {max(ids)}, but the model knows only {self.model.config.vocab_size}; leave out "
                "the special token that its tokenizer adds."
            )
        if len(ids) >= self.max_seq_len:
            raise InputError(
                f"The prompt has {len(ids)} tokens, but at most {self.max_seq_len - 1} fit beside an answer; "
                "shorten it or raise --max-seq-len."
            )

    def _run(
        self, prompts, encoded, options, max_new_tokens, stop, raw, first_index, keep_prefix
    ) -> Iterator[Piece]:
        if self.busy:
            raise RuntimeError("This Decoder is in the middle of another text; finish or close that one first.")
        self.busy = True
        program, size = self.program_for(options), self.batch
        waiting = deque(range(len(prompts)))
        slots: list[Request | None] = [None] * self.batch
        launched: deque[list[Request | None]] = deque()  # who was in which slot, for each round in flight
        try:
            self.warm_up(options)
            while waiting or any(slots):
                for slot in range(self.batch):
                    if slots[slot] is None and waiting:
                        i = waiting.popleft()
                        row = first_index + i
                        stream = TextStream(self.tokenizer, stop, continues=raw)
                        request = Request(i, row, prompts[i], encoded[i], stream, options.seed + row)
                        self._start(slot, request, options, max_new_tokens, keep_prefix)
                        slots[slot] = request
                if not waiting and (smaller := self._smaller(program, slots, size)) < size:
                    while (report := self.sizes.runner(size).oldest()) is not None:
                        yield from self._read(report, launched.popleft(), slots)
                    size = smaller
                    if any(slots):
                        self._gather(program, slots, size)
                    continue
                known = max(r.length for r in slots if r)
                launched.append(slots[:size])
                runner = self.sizes.runner(size)
                report = runner.step(program, runner.bucket_for(known))
                if report is not None:
                    yield from self._read(report, launched.popleft(), slots)
        finally:
            while self.sizes.runner(size).oldest() is not None:
                pass
            for slot, request in enumerate(slots):
                if request is not None:  # the caller went away in mid-answer
                    self._finish(slot, request)
            self.busy = False

    def _start(self, slot: int, request: Request, options: SamplingOptions, max_new_tokens: int, keep: bool) -> None:
        """Prefill all of the prompt but its last token, beyond what may be kept, and hand it to the rounds."""
        ids = request.prompt_ids
        cached, reusable = self.cached_ids[slot], 0
        if keep:
            reusable = self.runner.round.drafter.reusable(common_prefix(cached, ids[:-1]), len(cached) + 1)
        self.cached_ids[slot] = []  # nothing to rely on if prefill is interrupted
        if len(ids) - 1 > reusable:
            self.prefill.run(slot, ids, reusable)
        limit = min(len(ids) + max_new_tokens, self.max_seq_len)
        self.state.start(slot, ids, limit, options, request.row)

    def _smaller(self, program: str, slots: list[Request | None], size: int) -> int:
        """The size to go on with when nothing waits: some slots may have run empty."""
        texts = [(slot, request) for slot, request in enumerate(slots) if request is not None]
        left = max(int(self.state.limit[slot]) - request.length for slot, request in texts)
        return self.sizes.best(program, len(texts), size, left)

    def _gather(self, program: str, slots: list[Request | None], size: int) -> None:
        """Move what lies in slots from `size` on to empty ones below, and make the smaller program ready."""
        empty = deque(slot for slot in range(size) if slots[slot] is None)
        for source in range(size, self.batch):
            if slots[source] is not None:
                target = empty.popleft()
                self.sizes.move(source, target)
                slots[target], slots[source] = slots[source], None
                self.cached_ids[source] = []
        self.sizes.runner(size).warm_up(program)

    def _read(self, report, occupants, slots) -> Iterator[Piece]:
        """Hand a round's tokens to the requests that were in the slots when it was launched."""
        for slot, request in enumerate(occupants):
            if request is None or request.finish_reason is not None:
                continue
            count = report.length[slot] - request.length
            request.spent.add(report.seconds)
            tokens, n_drafted = report.new_tokens[slot][:count], report.n_drafted[slot]
            spans = request.take(tokens, n_drafted, report.done[slot], self.stop_ids)
            finished = request.finish_reason is not None
            if finished:
                self._finish(slot, request)
                slots[slot] = None
            if spans or finished:
                text = "".join(span.text for span in spans)
                yield Piece(request.index, text, request.result() if finished else None, tuple(spans))

    def _finish(self, slot: int, request: Request) -> None:
        """Free a slot, remembering which tokens its cache rows hold: all that was committed but the root."""
        self.state.stop(slot)
        length = int(self.state.length[slot])
        self.cached_ids[slot] = self.state.tokens[slot, : length - 1].tolist()


def common_prefix(a: list[int], b: list[int]) -> int:
    """With how many equal ids both begin."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def _is_list_of_prompts(prompts: Any) -> bool:
    """A string is one prompt, and so is a conversation: a list whose elements are messages."""
    if isinstance(prompts, str):
        return False
    return not prompts or not isinstance(prompts[0], Mapping)
