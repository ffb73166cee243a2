"""What `generate` of a replaced model does differently: the cache it makes, and that drafts may be taken back."""

from typing import Any

from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS
from transformers.generation.utils import GenerationMode

from .cache import GenerationCache


class ReplayGeneration:
    """Part of a replaced model's class. `generate` is called as before, with everything that it takes; besides,
    `prompt_lookup_num_tokens` and `assistant_model` work, which transformers refuses for models with a state."""

    _is_stateful = False  # drafts that are rejected leave nothing behind

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers'. An assistant must be without recurrent state, or replaced too: its drafts are taken back
        as well. Raises ValueError for one that is neither."""
        assistant = kwargs.get("assistant_model")
        if assistant is not None:
            if getattr(assistant, "_is_stateful", False):
                raise ValueError(f"generate: assistant_model {type(assistant).__name__} keeps a state that cannot be "
                                 "taken back; call replace(assistant_model) too")
            self._drafts = assistant.generation_config.num_assistant_tokens or 20
        try:
            return super().generate(*args, **kwargs)
        finally:
            self.__dict__.pop("_drafts", None)

    def _prefill(self, input_ids, generation_config, model_kwargs, *args: Any, **kwargs: Any) -> Any:
        """Leaves out what the cache holds already. transformers does so for models with attention only, and gives the
        others the whole text again."""
        cache, mask = model_kwargs.get("cache"), model_kwargs.get("attention_mask")
        if isinstance(cache, GenerationCache) and cache.started and all(cache.is_linear):
            whole = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
            if whole == input_ids.shape[1]:  # else the caller gave new tokens only
                held = cache.get_seq_length()
                if held >= whole:
                    raise ValueError(f"generate: input_ids are {whole} tokens, and the cache holds {held} already")
                input_ids = input_ids[:, held:]
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, batch_size,
                                      max_cache_length) -> None:
        given = model_kwargs.get("cache")
        assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        if given is not None and assisted and not isinstance(given, GenerationCache):
            raise ValueError(f"generate: cache is a {type(given).__name__}, which cannot take drafts back; expected "
                             "one of make_cache(model, num_spec=..), or none")
        if given is None and generation_config.use_cache is not False:
            kind, max_len = generation_config.cache_implementation, None
            if kind in ALL_STATIC_CACHE_IMPLEMENTATIONS and "offloaded" not in kind:
                max_len = max(max_cache_length, generation_config.max_cache_len or 0)
            elif kind not in (None, "dynamic"):
                raise ValueError(f"generate: cache_implementation is {kind!r}, expected None, 'dynamic' or 'static': "
                                 "recurrent states are small, and are neither offloaded nor quantised here")
            rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            options = self.replay
            drafts = max(options.num_spec, generation_config.prompt_lookup_num_tokens or 0, getattr(self, "_drafts", 0))
            if generation_config.is_assistant:
                drafts = max(drafts, generation_config.num_assistant_tokens or 20)
            cache = self._new_cache(rows, max_len, max(options.window, drafts + 1), drafts)
            if generation_config.is_assistant:
                cache.activate_past_recording()
            model_kwargs["cache"] = cache
            return
        super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, batch_size,
                                              max_cache_length)
