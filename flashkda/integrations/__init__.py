"""Doors for code that already calls another KDA library; each is opened by a call of its own.

Nothing here is imported by ``import flashkda``, and importing a module of it needs neither the
library that it is a door to nor a GPU.

- :mod:`flashkda.integrations.fla`: flash-linear-attention calls flashkda.
- :mod:`flashkda.integrations.flash_kda`: a module with the name and functions of FlashKDA.
- :mod:`flashkda.integrations.vllm`: the operator of vLLM's extension; functions on its pool.
- :mod:`flashkda.integrations.sglang`: the phases of a KDA kernel of SGLang.
"""
