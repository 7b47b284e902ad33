"""The live module that holds one cos/sin table: derives it, grows it, rotates with it. Both subsystems build on it."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from common import cache_liveness, rope_frequencies
from common.cache_liveness import DeadBufferError, LiveBuffers, logger
from common.rope_frequencies import RopeSpec
from common.rope_kernel import PositionError, register_live, rotate, rotate_now, row_checks

EXACT_POSITIONS = 1 << 24  # float32 holds every integer up to here; a table beyond would repeat rows
_ATTEMPTS = 4  # a second owner may break the table again between healing and rotating


class RopeTable(LiveBuffers):
    """Rotary position embedding by a table of cos and sin, shared by all that ask for the same numbers.

    Buffer ``cos_sin_cache``: float32 ``[rows, rotary_dim]``, row ``p`` is ``cos(p * inv_freq) * scale`` in the first
    half and ``sin(p * inv_freq) * scale`` in the second, bit for bit as Hugging Face computes them on a CPU. It
    begins with ``min(max_position, table limit)`` rows and grows when a position asks for it.

    Args:
        spec: the validated numbers of the rope type.
        head_size: elements of a head; those from ``rotary_dim`` on pass unrotated.
        is_neox_style: rotate pairs ``(i, i + rotary_dim/2)`` as GPT-NeoX does, else ``(2i, 2i+1)`` as GPT-J does.
    """

    def __init__(
        self,
        spec: RopeSpec,
        head_size: int,
        is_neox_style: bool,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.head_size = head_size
        self.rotary_dim = spec.rotary_dim
        self.is_neox_style = is_neox_style
        device = torch.get_default_device() if device is None else torch.device(device)
        self._rows = self._rows_at_hand(rope_frequencies.table_rows(spec), device)
        pieces = cache_liveness.born_clean(spec.pieces, self._rows)
        self._values_key = (tuple(tuple(inv_freq.tolist()) for inv_freq, _, _ in pieces), pieces[0][1])
        self._prepare()
        self.build_buffers(device)

    def _prepare(self) -> None:
        """What belongs to this object and not to its arguments."""
        self._handle = register_live(self, type(self).__qualname__, self.spec, self.head_size, self.is_neox_style)
        axes = self.spec.pair_axes
        self._pair_axis = (
            None
            if axes is None
            else cache_liveness.born_clean(lambda: torch.tensor(axes, dtype=torch.uint8, device="cpu"))
        )

    def __getstate__(self) -> dict:
        state = super().__getstate__()
        for name in ("_handle", "_pair_axis"):
            del state[name]
        return state

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._prepare()

    def _replicate_for_data_parallel(self) -> RopeTable:
        replica = super()._replicate_for_data_parallel()
        replica._prepare()
        return replica

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"cos_sin_cache": (self._rows, self.rotary_dim)}

    def derivation(self) -> Hashable:
        return ("cos_sin_cache", self._rows, *self.spec.factor_rows.values(), *self._values_key)

    def derive(self) -> dict[str, Tensor]:
        return {"cos_sin_cache": self.spec.table(self._rows)}

    def checksum(self, tensor: Tensor) -> Tensor:
        return row_checks(tensor)

    # growing

    def reserve(self, rows: int) -> None:
        """Make room for positions below ``rows`` now: before a graph is captured, or a loop must not pause.

        Raises:
            IndexError: the rope type's values depend on the table's length, the table joins several factors, or
                positions are no longer exact.
        """
        if rows <= self._rows:
            return
        spec, last = self.spec, rows - 1
        if last >= spec.full_rows and spec.factor_rows:
            raise IndexError(
                f"position {last}, with its offset, is beyond the {spec.full_rows} rows of the joint table of the "
                f"factors {list(spec.factor_rows)}; it cannot grow, which would move their offsets: "
                "give a larger max_position"
            )
        if last >= spec.full_rows and not spec.grows:
            raise IndexError(
                f"position {last} is beyond the {spec.full_rows} positions of this {spec.rope_type!r} rope"
            )
        if last >= EXACT_POSITIONS:
            raise IndexError(f"position {last} is beyond {EXACT_POSITIONS}, up to which float32 holds every position")
        with cache_liveness._LOCK:
            if rows > self._rows:
                buffer = self._buffers.get("cos_sin_cache")
                device = buffer.device if isinstance(buffer, Tensor) else torch.device("cpu")
                before, self._rows = self._rows, self._rows_at_hand(rows, device)
                self._shapes = self.shapes()
                self._place(device)
                logger.info("%s: grew from %d to %d rows", type(self).__name__, before, self._rows)

    def _rows_at_hand(self, rows: int, device: torch.device) -> int:
        """``rows``, or more where a table of the same numbers has them: that one's memory then serves both."""
        where = str(cache_liveness._with_index(device))
        with cache_liveness._LOCK:
            for table in list(cache_liveness._LIVE_MODULES):
                if isinstance(table, RopeTable) and table.spec == self.spec and (table._owned or ("", ""))[1] == where:
                    rows = max(rows, table._rows)
        return rows

    def _cover(self, positions: Tensor | None, error: PositionError) -> None:
        """Grow the table over ``positions``, geometrically; IndexError where that cannot be."""
        if error.position < 0:
            raise IndexError(f"position {error.position} is negative")
        need = (error.position if positions is None else int(cache_liveness.born_clean(positions.max))) + 1
        if need <= self._rows:  # grown meanwhile, or the table was cut short
            self._look_again()
            return
        full = self.spec.full_rows
        ceiling = EXACT_POSITIONS if need > full and self.spec.grows else full
        self.reserve(max(need, min(2 * self._rows, ceiling)))

    def _look_again(self) -> bool:
        """Compare every value, of the tables on other devices too, and heal; whether any was wrong."""
        found = False
        with cache_liveness._LOCK:
            for table in (self, *self._twins.values()):
                fault = None if table._asleep else table.fault(verify=True)
                if fault is not None:
                    table.heal(*fault)
                    found = True
        return found

    # rotating

    def rotate_now(
        self,
        positions: Tensor | None,
        query: Tensor,
        key: Tensor | None,
        *,
        inplace: bool = False,
        inverse: bool = False,
        head_size: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate ``query`` and ``key``, ``[tokens, heads, head_size]`` or ``[batch, seq, heads, head_size]`` (or flat,
        see :func:`common.rope_kernel.rotate`), by a table that was checked, healed and grown as needed before anything
        is written. Where the rope's positions have several axes, positions of one dimension are the same on all of
        them (text). For tensors that need the kernel alone: :func:`common.rope_kernel.live_rotate` minds the others."""
        if query.is_meta:
            empty = torch.empty_like
            return (query, key) if inplace else (empty(query), None if key is None else empty(key))
        pair_axis = None if positions is None or positions.dim() == 1 else self._pair_axis
        for attempt in range(_ATTEMPTS):
            lock = cache_liveness._LOCK
            if attempt:  # another thread may have released the memory meanwhile: now none does
                lock.acquire()
            try:
                # another tensor of the same memory, which nobody takes away from it while rows are read
                table = self.live("cos_sin_cache", query.device).data
                checks = self._checks.get("cos_sin_cache")
                flags = self.is_neox_style, inverse, inplace, head_size
                return rotate_now(query, key, positions, table, None, pair_axis, checks, 0.0, *flags)
            except PositionError as error:
                self._cover(positions, error)
            except (DeadBufferError, ValueError) as error:
                # the table is wrong though nothing left a trace, another owner ruined it meanwhile, or, when the last
                # attempt finds nothing either, the arguments do not fit
                found = self._look_again()
                if not found and isinstance(error, ValueError) and attempt == _ATTEMPTS - 1:
                    raise
            finally:
                if attempt:
                    lock.release()
        raise DeadBufferError(
            f"cos_sin_cache of {type(self).__name__} was wrong again after each of {_ATTEMPTS} rebuilds: "
            "another owner keeps overwriting it; give that owner a module of its own"
        )

    def rotate_exported(
        self, positions: Tensor | None, query: Tensor, key: Tensor | None, *, inplace: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The rotation with the table as an input of the graph that is being exported: that graph runs where this
        module is not, so its table neither heals nor grows, but rows that are not the derived ones are refused."""
        return rotate(
            query,
            key,
            positions,
            self._buffers["cos_sin_cache"],
            is_neox_style=self.is_neox_style,
            pair_axis=None if positions is None or positions.dim() == 1 else self._pair_axis,
            inplace=inplace,
            row_checks=self._checks.get("cos_sin_cache"),
            scale=self._values_key[1],
        )

    def extra_repr(self) -> str:
        return (
            f"{self.spec.rope_type}, head_size={self.head_size}, rotary_dim={self.rotary_dim}, base={self.spec.base}, "
            f"max_position={self.spec.max_position}, is_neox_style={self.is_neox_style}"
        )
