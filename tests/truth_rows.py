"""Packed rows for truths that know padded ones: each row's tokens are copied to a row of their own, and back."""

import functools
import inspect

import torch


def takes_packed_rows(*tokens: str):
    """Decorator of a truth; tokens: its arguments that have tokens, the first laid out like its output."""

    def decorate(truth):
        parameters = list(inspect.signature(truth).parameters)

        @functools.wraps(truth)
        def run(*args, query_start_loc=None, max_query_len=None, **kwargs):
            arguments = dict(zip(parameters, args)) | kwargs
            if query_start_loc is None:
                return truth(**arguments)
            rows, lens, like = len(arguments["slots"]), arguments["query_lens"], arguments[tokens[0]]
            first = [int(start) for start in query_start_loc]
            for name in tokens:
                packed = arguments[name]
                if packed is None:
                    continue
                nothing = float("nan") if packed.is_floating_point() else 0
                padded = packed.new_full((rows, max_query_len, *packed.shape[1:]), nothing)
                for row in range(rows):
                    own = packed[first[row] : first[row + 1]]
                    padded[row, : len(own)] = own
                arguments[name] = padded
            if lens is None:
                lens = arguments["query_lens"] = torch.tensor([b - a for a, b in zip(first, first[1:])])
            padded, out = truth(**arguments), torch.zeros_like(like)
            for row in range(rows):
                out[first[row] : first[row] + int(lens[row])] = padded[row, : int(lens[row])]
            return out

        return run

    return decorate
