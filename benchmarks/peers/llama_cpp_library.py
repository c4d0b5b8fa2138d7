"""What is used of llama.cpp's C interface, through ctypes.

Structs are passed by value: their layout is that of the release in the Makefile, and `load` compares the
defaults that the library fills in with those of this layout.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_uint32, c_void_p
from pathlib import Path

F32, F16 = 0, 1  # ggml_type


class ModelParams(Structure):
    """llama_model_params, used with its defaults only."""

    _fields_ = (("opaque", c_void_p * 16),)


class ContextParams(Structure):
    """llama_context_params."""

    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("types", c_int * 5),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn", c_float * 4),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p * 2),
        ("type_k", c_int),
        ("type_v", c_int),
        ("abort_callback", c_void_p * 2),
        ("flags", c_bool * 6),  # the last is kv_unified
        ("samplers", c_void_p * 8),
    )


class QuantizeParams(Structure):
    """llama_model_quantize_params."""

    _fields_ = (
        ("nthread", c_int32),
        ("ftype", c_int),
        ("output_tensor_type", c_int),
        ("token_embedding_type", c_int),
        ("allow_requantize", c_bool),
        ("quantize_output_tensor", c_bool),
        ("rest", c_void_p * 16),
    )


class Batch(Structure):
    """llama_batch."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


# Result, arguments.
_FUNCTIONS = {
    "llama_backend_init": (None,),
    "llama_print_system_info": (c_char_p,),
    "llama_model_default_params": (ModelParams,),
    "llama_context_default_params": (ContextParams,),
    "llama_model_quantize_default_params": (QuantizeParams,),
    "llama_model_quantize": (c_uint32, c_char_p, c_char_p, POINTER(QuantizeParams)),
    "llama_model_load_from_file": (c_void_p, c_char_p, ModelParams),
    "llama_init_from_model": (c_void_p, c_void_p, ContextParams),
    "llama_model_get_vocab": (c_void_p, c_void_p),
    "llama_vocab_n_tokens": (c_int32, c_void_p),
    "llama_batch_init": (Batch, c_int32, c_int32, c_int32),
    "llama_decode": (c_int32, c_void_p, Batch),
    "llama_get_logits_ith": (c_void_p, c_void_p, c_int32),
    "llama_get_memory": (c_void_p, c_void_p),
    "llama_memory_seq_rm": (c_bool, c_void_p, c_int32, c_int32, c_int32),
}


def load(folder: Path) -> ctypes.CDLL:
    """Load libllama from a folder, and the variant of its kernels that suits this CPU best.

    Raises RuntimeError if the library's structs are not those of this file.
    """
    path = next(folder.glob("libllama.*"))
    lib = ctypes.CDLL(str(path))
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    backends = ctypes.CDLL(str(next(folder.glob("libggml.*"))))
    backends.ggml_backend_load_all_from_path.argtypes = [c_char_p]
    backends.ggml_backend_load_all_from_path(str(folder).encode())
    lib.llama_backend_init()
    made = lib.llama_context_default_params()
    files = lib.llama_model_quantize_default_params()
    found = (made.n_ctx, made.n_batch, made.n_ubatch, made.n_seq_max, made.type_k, made.type_v, files.nthread)
    if found != (512, 2048, 512, 1, 1, 1, 0) or made.defrag_thold != -1 or not files.quantize_output_tensor:
        raise RuntimeError(f"{path}: other structs than in llama_cpp_library.py; its defaults are {found}")
    return lib
