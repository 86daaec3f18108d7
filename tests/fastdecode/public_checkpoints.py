"""Public models, made small: one table of what each checkpoint holds, and the folder that it becomes."""

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import public_configs as configs
import public_generation as generation
import public_heads as heads
import public_templates as templates
import torch
import transformers
from public_heads import PublicHead
from public_tokenizers import byte_level_json, sentencepiece_model
from tokenizers import Tokenizer as VocabularyFile

from fastdecode.tokenizer import Tokenizer, load_tokenizer

LLAMA_TOKENS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
)  # fmt: skip
R1_BOS, R1_EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
S_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
DICT_TOKENS = {
    name: {"__type": "AddedToken", "content": token, "lstrip": False, "normalized": True, "single_word": False}
    for name, token in S_TOKENS.items()
}
VICUNA_OPENING = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions. "
)


@dataclass(frozen=True)
class Public:
    """A public model.

    `control`: tokens that are no text, beside SentencePiece's own; `texts`: added tokens that are. `place`: where its
    template is (text, named, jinja, or none, for `--chat-template vicuna`). `chat`: the text of TALK; `with_system`:
    how the text begins after a system message, None where the template refuses one. `stops`: tokens that end an
    answer. `padding`: rows of the embedding beyond the tokenizer's.
    """

    name: str
    config: dict[str, Any]
    generation: dict[str, Any]
    template: str
    chat: str
    with_system: str | None
    stops: tuple[str, ...]
    tokenizer: dict[str, Any]  # tokenizer_config.json
    control: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    sentencepiece: bool = False
    special_first: bool = False
    post_bos: str | None = None
    place: str = "text"
    padding: int = 0
    shards: bool = True
    heads: tuple[PublicHead, ...] = field(default=())

    @property
    def chat_template(self) -> str | None:
        """What the user gives as --chat-template."""
        return "vicuna" if self.place == "none" else None


def _of_sentencepiece(name: str, config: dict[str, Any], **rest: Any) -> Public:
    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "legacy": False,
        "model_max_length": 1000000000000000019884624838656,
        "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizer",
        **rest.pop("tokenizer", S_TOKENS),
    }
    return Public(name, config, tokenizer=settings, sentencepiece=True, stops=("</s>",), **rest)


def _vicuna(name: str, config: dict[str, Any], *own: PublicHead) -> Public:
    return _of_sentencepiece(
        name, config, generation=generation.VICUNA_GENERATION, template="", place="none", heads=own,
        chat=VICUNA_OPENING + "USER:  hello there ASSISTANT: hello </s>USER: what now? ASSISTANT:",
        with_system="be brief USER: ", tokenizer=DICT_TOKENS | {"pad_token": None},
    )  # fmt: skip


def _mistral(name: str, config: dict[str, Any], template: str, answer: str, **rest: Any) -> Public:
    return _of_sentencepiece(
        name, config, generation=generation.PLAIN_GENERATION, template=template, with_system=None,
        chat=f"<s>[INST]  hello there [/INST]{answer}[INST] what now? [/INST]",
        tokenizer=S_TOKENS | {"legacy": True, "additional_special_tokens": []}, **rest,
    )  # fmt: skip


def _llama_3(name: str, config: dict[str, Any], opening: str, **rest: Any) -> Public:
    def turn(role, text):
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}"

    talk = turn("user", "hello there<|eot_id|>") + turn("assistant", "hello<|eot_id|>")
    system = opening + "be brief<|eot_id|>" if opening else turn("system", "be brief<|eot_id|>")
    return Public(
        name, config, control=LLAMA_TOKENS, post_bos="<|begin_of_text|>",
        chat="<|begin_of_text|>" + (opening + "<|eot_id|>" if opening else "") + talk
        + turn("user", "what now?<|eot_id|>") + turn("assistant", ""),
        with_system="<|begin_of_text|>" + system + turn("user", ""),
        tokenizer={
            "bos_token": "<|begin_of_text|>", "clean_up_tokenization_spaces": True, "eos_token": "<|eot_id|>",
            "model_input_names": ["input_ids", "attention_mask"], "tokenizer_class": "PreTrainedTokenizerFast",
        }, **rest,
    )  # fmt: skip


def _chatml(name: str, config: dict[str, Any], template: str, system: str, **rest: Any) -> Public:
    opening = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return Public(
        name, config, template=template, control=CHATML_TOKENS, with_system="<|im_start|>system\nbe brief<|im_end|>\n",
        chat=opening + "<|im_start|>user\n hello there<|im_end|>\n<|im_start|>assistant\nhello <|im_end|>\n"
        "<|im_start|>user\nwhat now?<|im_end|>\n<|im_start|>assistant\n", **rest,
    )  # fmt: skip


def _qwen(name: str, config: dict[str, Any], template: str, system: str, **rest: Any) -> Public:
    settings = {
        "add_bos_token": False, "add_prefix_space": False, "bos_token": None, "eos_token": "<|im_end|>",
        "errors": "replace", "pad_token": "<|endoftext|>", "split_special_tokens": False, "unk_token": None,
        "tokenizer_class": "Qwen2Tokenizer",
    }  # fmt: skip
    return _chatml(
        name, config, template, system, generation=generation.QWEN_GENERATION, tokenizer=settings, padding=27,
        stops=("<|im_end|>", "<|endoftext|>"), **rest,
    )  # fmt: skip


def _smollm2(name: str, config: dict[str, Any]) -> Public:
    settings = {
        "add_prefix_space": False, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>",
        "tokenizer_class": "GPT2Tokenizer", "unk_token": "<|endoftext|>", "vocab_size": 49152,
    }  # fmt: skip
    return _chatml(
        name, config, templates.SMOLLM2, templates.SMOL_SYSTEM, generation=generation.SMOLLM2_GENERATION,
        tokenizer=settings, stops=("<|im_end|>",), special_first=True, shards=False,
    )  # fmt: skip


def _r1(name: str, config: dict[str, Any], **rest: Any) -> Public:
    named = {"bos_token": R1_BOS, "eos_token": R1_EOS, "pad_token": R1_EOS}
    token = {"__type": "AddedToken", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    settings = {
        "add_bos_token": True, "add_eos_token": False, "legacy": True, "unk_token": None, "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizerFast",
    } | {name: token | {"content": content} for name, content in named.items()}  # fmt: skip
    return Public(
        name, config, generation.R1_GENERATION, templates.R1, stops=(R1_EOS,), tokenizer=settings,
        chat=f"{R1_BOS}<｜User｜> hello there<｜Assistant｜>hello {R1_EOS}<｜User｜>what now?<｜Assistant｜><think>\n",
        with_system=f"{R1_BOS}be brief<｜User｜>", control=(R1_BOS, R1_EOS), post_bos=R1_BOS,
        texts=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"), **rest,
    )  # fmt: skip


SYSTEM_3_1 = "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: {}\n\n"
LLAMA_3_STOPS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
THINKING = {"texts": ("<think>", "</think>")}
DEEP = {"num_hidden_layers": 8}  # EAGLE-3's three layers should differ

PUBLIC = [
    _of_sentencepiece(
        "Llama-2-7b-chat", configs.LLAMA_2, generation=generation.LLAMA_2_GENERATION, template=templates.LLAMA_2,
        chat="<s>[INST] hello there [/INST] hello </s><s>[INST] what now? [/INST]", tokenizer=DICT_TOKENS,
        with_system="<s>[INST] <<SYS>>\nbe brief\n<</SYS>>\n\n", heads=(heads.LLAMA_2_HEAD,),
    ),
    _vicuna("vicuna-7b-v1.3", configs.VICUNA_1_3, heads.VICUNA_HEAD),
    _vicuna("vicuna-13b-v1.3", configs.VICUNA_1_3 | DEEP, heads.VICUNA_EAGLE3),
    _vicuna("vicuna-7b-v1.5", configs.VICUNA_1_5),
    _llama_3(
        "Llama-3-8B-Instruct", configs.LLAMA_3, "", generation=generation.LLAMA_3_0_GENERATION,
        template=templates.LLAMA_3, stops=("<|end_of_text|>", "<|eot_id|>"), heads=(heads.LLAMA_3_EAGLE1,),
    ),
    _llama_3(
        "Llama-3.1-8B-Instruct", configs.LLAMA_3_1 | DEEP, SYSTEM_3_1.format("26 Jul 2024"), stops=LLAMA_3_STOPS,
        generation=generation.LLAMA_3_GENERATION, template=templates.LLAMA_3_1,
        heads=(heads.LLAMA_3_EAGLE3, heads.RED_HAT),
    ),
    _llama_3(
        "Llama-3.2-1B-Instruct", configs.LLAMA_3_2, SYSTEM_3_1.format("20xx"), stops=LLAMA_3_STOPS,
        generation=generation.LLAMA_3_GENERATION, template=templates.LLAMA_3_2, place="jinja", shards=False,
    ),
    _r1("DeepSeek-R1-Distill-Llama-8B", configs.R1_LLAMA | DEEP, heads=(heads.R1_EAGLE3,)),
    _r1("DeepSeek-R1-Distill-Qwen-7B", configs.R1_QWEN, padding=27),
    _mistral("Mistral-7B-Instruct-v0.1", configs.MISTRAL_0_1, templates.MISTRAL_0_1, "hello </s> "),
    _mistral("Mistral-7B-Instruct-v0.2", configs.MISTRAL_0_2, templates.MISTRAL_0_2, " hello </s>"),
    _mistral(
        "Mistral-7B-Instruct-v0.3", configs.MISTRAL_0_3, templates.MISTRAL_0_3, " hello</s>", place="named",
        control=("[INST]", "[/INST]"),
    ),
    _mistral(
        "Mixtral-8x7B-Instruct-v0.1", configs.MIXTRAL, templates.MISTRAL_0_2, " hello </s>",
        heads=(heads.MIXTRAL_HEAD,),
    ),
    _qwen(
        "Qwen2-7B-Instruct", configs.QWEN_2, templates.chatml("You are a helpful assistant."),
        "You are a helpful assistant.", heads=(heads.QWEN_2_HEAD,),
    ),
    _qwen("Qwen2.5-7B-Instruct", configs.QWEN_2_5, templates.QWEN_2_5, templates.QWEN_SYSTEM),
    _qwen("Qwen2.5-0.5B-Instruct", configs.QWEN_2_5_TIED, templates.QWEN_2_5, templates.QWEN_SYSTEM, shards=False),
    _qwen("Qwen3-8B", configs.QWEN_3 | DEEP, templates.QWEN_3, "", heads=(heads.ANGELSLIM,), **THINKING),
    _qwen("Qwen3-0.6B", configs.QWEN_3_TIED, templates.QWEN_3, "", shards=False, **THINKING),
    _qwen("Qwen3-30B-A3B", configs.QWEN_3_MOE | {"num_hidden_layers": 6}, templates.QWEN_3, "",
          heads=(heads.SPECFORGE,), **THINKING),
    _smollm2("SmolLM2-135M-Instruct", configs.SMOLLM2),
    _smollm2("SmolLM2-1.7B-Instruct", configs.SMOLLM2_BIG),
    _of_sentencepiece(
        "TinyLlama-1.1B-Chat-v1.0", configs.TINYLLAMA, generation=generation.PLAIN_GENERATION | {"max_length": 2048},
        template=templates.ZEPHYR, with_system="<|system|>\nbe brief</s>\n", shards=False,
        chat="<|user|>\n hello there</s>\n<|assistant|>\nhello </s>\n<|user|>\nwhat now?</s>\n<|assistant|>\n",
        tokenizer=S_TOKENS | {"pad_token": "</s>", "padding_side": "right"},
    ),
]  # fmt: skip


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token. Raises ValueError where it is none."""
    token_id = tokenizer.encode(token)[-1]
    if tokenizer.token_bytes(token_id):
        raise ValueError(f"{token!r} is no special token")
    return token_id


def write_public(folder: Path, public: Public) -> transformers.PreTrainedModel:
    """Write the checkpoint to `folder`, and its heads beside it; returns the reference library's model, in fp32.

    The reference reads the same config.json; its random numbers are rounded to the precision of the files."""
    folder.mkdir(parents=True)
    _write_tokenizer(folder, public)
    tokenizer = load_tokenizer(folder)
    id_of = partial(special_id, tokenizer)
    vocab_size = tokenizer.vocab_size + public.padding
    config = configs.published(public.config, id_of) | {"vocab_size": vocab_size}
    _write_json(folder / "config.json", config)
    reference = _reference(folder)
    dtype = getattr(torch, config["torch_dtype"])
    weights = {name: tensor.to(dtype) for name, tensor in reference.state_dict().items()}
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    reference.save_pretrained(folder, state_dict=weights, max_shard_size="200KB" if public.shards else "1GB")
    _write_json(folder / "config.json", config)  # as it was published, not as the library writes it today
    _write_json(folder / "generation_config.json", configs.published(public.generation, id_of))
    for index, head in enumerate(public.heads):
        heads.write_public_head(folder.parent / f"head{index}", head, vocab_size, id_of)
    return reference


def _reference(folder: Path) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    dtype = getattr(torch, json.loads((folder / "config.json").read_text())["torch_dtype"])
    for name, parameter in model.named_parameters():
        numbers = torch.rand_like(parameter) + 0.5 if "norm" in name else torch.randn_like(parameter) * 0.2
        parameter.copy_(numbers.to(dtype))
    return model


def _write_tokenizer(folder: Path, public: Public) -> None:
    settings = dict(public.tokenizer)
    if public.sentencepiece:
        (folder / "tokenizer.model").write_bytes(sentencepiece_model(*public.control))
    else:
        text = byte_level_json(public.control, public.texts, public.post_bos, public.special_first)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        added = VocabularyFile.from_str(text).get_added_tokens_decoder()
        settings["added_tokens_decoder"] = {
            str(i): {"content": token.content, "normalized": False, "special": token.special}
            for i, token in added.items()
        }
    if public.place == "text":
        settings["chat_template"] = public.template
    elif public.place == "named":
        named = {"default": public.template, "tool_use": "{{ raise_exception('tools') }}"}
        settings["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    elif public.place == "jinja":
        (folder / "chat_template.jinja").write_text(public.template, encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
