"""How numba compiles functions that only kernels call: to LLVM's code, which is linked into the kernels.

numba would make machine code of each function, which is never run. It would also optimize a large function
again in everything that calls it, to several levels; here that is done once.
"""

from typing import Any

from numba._dynfunc import make_function
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import LoweringPass, register_pass
from numba.core.typed_passes import NativeLowering

# LLVM would not inline a function of so many instructions.
_LARGE = 1000


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """Code that is linked into its callers, unless it is large: then they only declare it.

    apart: what must be linked into the kernel in the end.
    """

    def __init__(self, codegen: Any, name: str) -> None:
        super().__init__(codegen, name)
        self.apart: dict[_Library, None] = {}

    def add_linking_library(self, library: Any) -> None:
        library._ensure_finalized()
        self.apart |= getattr(library, "apart", {})
        if getattr(library, "is_large", False):
            self.apart[library] = None
        else:
            super().add_linking_library(library)


class _Inner(_Library):
    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        functions = [f for f in self._final_module.functions if not f.is_declaration]
        size = sum(1 for f in functions for block in f.blocks for _ in block.instructions)
        self.is_large = size > _LARGE and not any(
            b"alwaysinline" in a for f in functions for a in f.attributes
        )
        self._finalized = True


class _Outer(_Library):
    def _optimize_final_module(self) -> None:
        super()._optimize_final_module()
        # LLVM links only what is called already: callers come first.
        for library in reversed(self.apart):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)


@register_pass(mutates_CFG=False, analysis_only=False)
class _Insert(LoweringPass):  # type: ignore[misc]
    """Let other functions call the function that was lowered."""

    _name = "insert_inner_function"

    def __init__(self) -> None:
        LoweringPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        fndesc = state["cr"].fndesc
        env = state["cr"].env
        # What numba knows a function by. Python could not call it: its address is 0.
        known = make_function(fndesc.lookup_module(), fndesc.qualname, "", 0, env, (state.library,))
        state.targetctx.insert_user_function(known, fndesc, [state.library])
        state["cr"] = state["cr"]._replace(cfunc=known)
        return True


class InnerCompiler(CompilerBase):  # type: ignore[misc]
    """numba's compiler for functions that kernels call."""

    def define_pipelines(self) -> list[Any]:
        """Return numba's passes without machine code generation."""
        state = self.state
        state.library = _Inner(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        passes = DefaultPassBuilder.define_nopython_pipeline(state)
        passes.add_pass_after(_Insert, NativeLowering)
        passes.finalize()
        return [passes]


class KernelCompiler(CompilerBase):  # type: ignore[misc]
    """numba's compiler for kernels."""

    def define_pipelines(self) -> list[Any]:
        """Return numba's passes, which end by generating machine code for the kernel with all its calls."""
        state = self.state
        state.library = _Outer(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return [DefaultPassBuilder.define_nopython_pipeline(state)]
