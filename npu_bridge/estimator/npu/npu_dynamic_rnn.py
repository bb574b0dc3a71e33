"""Defines recurrent layers that return all states and gates of every time step.

The layers are Keras layers, built at the first call. They work in TF 1 graphs, in `tf.function` and eagerly. Inputs and
outputs are time-major.
"""

from __future__ import annotations

import types
from typing import Any

import tensorflow as tf

from npu_bridge.base.errors import message
from npu_bridge.operators import recurrent
from npu_bridge.operators.recurrent import GATE_ORDERS, GruRule, GruWeights
from npu_bridge.operators.unavailable import not_available_error

__all__ = ["DynamicAUGRU", "DynamicGRUV2", "DynamicRNN"]

_UNIDIRECTIONAL, _BIDIRECTIONAL = "UNIDIRECTIONAL", "BIDIRECTIONAL"
# The batch size of the variable `seq_length` if the batch size of the input is unknown.
_USUAL_BATCH = 16


def _make_read_only_property(name: str) -> property:
    """Returns a read-only property for an argument of the constructor."""
    return property(lambda layer: getattr(layer._arguments, name), doc=f"The argument `{name}` of the constructor.")


class _DynamicLayer(tf.keras.layers.Layer):
    """A base class of layers: checks and stores their arguments, and makes the variable that all of them have.

    Args:
      given: `locals()` of the layer's constructor, which include the arguments.
    """

    hidden_size = _make_read_only_property("hidden_size")
    direction = _make_read_only_property("direction")
    cell_depth = _make_read_only_property("cell_depth")
    keep_prob = _make_read_only_property("keep_prob")
    cell_clip = _make_read_only_property("cell_clip")
    num_proj = _make_read_only_property("num_proj")
    time_major = _make_read_only_property("time_major")
    activation = _make_read_only_property("activation")
    is_training = _make_read_only_property("is_training")
    # The only allowed values of arguments that no kernel of the NPU stack supports.
    _fixed = {"cell_depth": 1, "keep_prob": 1, "cell_clip": -1, "num_proj": 0, "time_major": True, "activation": "tanh"}

    def __init__(self, given: dict[str, Any]):
        arguments = {name: value for name, value in given.items() if name not in ("self", "__class__")}
        # Without autocast, Keras would not cast inputs in scripts that have switched off TensorFlow 2 behaviour.
        name = arguments.pop("name") or type(self).__name__.lower()
        super().__init__(name=name, dtype=arguments["dtype"], autocast=True)
        self._arguments = types.SimpleNamespace(**arguments)  # Keras would wrap a dictionary
        self._check_arguments()

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {**vars(self._arguments), "dtype": self.dtype, "name": self.name}

    def build(self, input_shape: Any) -> None:
        """Makes the variables for inputs [T, B, D]; raises ValueError if D is unknown."""
        steps, batch, depth = tf.TensorShape(input_shape).as_list()
        if depth is None:
            raise self._error(
                "the depth of x is unknown", "shape [T, B, D] with known D", f"shape {input_shape}", "Set D."
            )
        self._make_weights(depth)
        # Unused here. Checkpoints of the NPU stack have this variable, under a name outside of any layer.
        with tf.name_scope("dynamicbase/"):
            self._seq_length = tf.Variable(
                tf.fill([_USUAL_BATCH if batch is None else batch], 1 if steps is None else steps),
                trainable=False,
                name="seq_length",
            )
        super().build(input_shape)

    def _make_weights(self, depth: int) -> None:
        raise NotImplementedError

    def _check_arguments(self) -> None:
        arguments = vars(self._arguments)
        for name, value in self._fixed.items():
            if arguments[name] != value:
                raise self._error(
                    f"{name} has an unsupported value", repr(value), repr(arguments[name]), "Leave it out."
                )
        if arguments["direction"] not in (_UNIDIRECTIONAL, _BIDIRECTIONAL):
            expected = f"{_UNIDIRECTIONAL!r} or {_BIDIRECTIONAL!r}"
            raise self._error("direction is unknown", expected, repr(arguments["direction"]), "Use one of these.")
        if tf.as_dtype(arguments["dtype"]) not in (tf.float16, tf.float32):
            raise self._error(
                "dtype is not supported", "float16 or float32", repr(arguments["dtype"]), "Use one of these."
            )

    def _error(self, problem: str, expected: str, got: str, fix: str) -> ValueError:
        return ValueError(message(type(self).__name__, problem, expected, got, fix))

    def _initial_states(self, given_states: Any, x: tf.Tensor, directions: int = 1) -> list[tf.Tensor]:
        """Returns a list of the initial states [B, H], one for each direction; zeros if `given_states` is None."""
        shape = [directions, tf.shape(x)[1], self.hidden_size]
        state = tf.zeros(shape, x.dtype) if given_states is None else tf.reshape(tf.cast(given_states, x.dtype), shape)
        return tf.unstack(tf.ensure_shape(state, [directions, x.shape.as_list()[1], self.hidden_size]))


class DynamicRNN(_DynamicLayer):
    """An LSTM: c ← σ(f + forget_bias)·c + σ(i)·tanh(j), h ← σ(o)·tanh(c), where [x, h]·w + b holds i, j, f and o.

    Variables: `dynamicrnn/w` [D + H, 4H], glorot-uniform, and `dynamicrnn/b` [4H], zeros; with a leading axis of 2
    if the layer is bidirectional. `dynamicbase/seq_length` is not trained and has no effect.

    Args:
      hidden_size: H.
      dtype: float16 or float32.
      cell_type: "LSTM".
      direction: "UNIDIRECTIONAL" or "BIDIRECTIONAL".
      forget_bias: added to f.
      is_training: has no effect.
      cell_depth, use_peephole, keep_prob, cell_clip, num_proj, time_major, activation: only the defaults are allowed.
      name: name of the layer, for a model with several; by default the name of the class in lower case.
    Raises:
      ValueError: an argument has a value that is not allowed.
    """

    cell_type = _make_read_only_property("cell_type")
    use_peephole = _make_read_only_property("use_peephole")
    forget_bias = _make_read_only_property("forget_bias")
    _fixed = {**_DynamicLayer._fixed, "cell_type": "LSTM", "use_peephole": False}

    def __init__(
        self,
        hidden_size: int,
        dtype: Any,
        cell_type: str = "LSTM",
        direction: str = _UNIDIRECTIONAL,
        cell_depth: int = 1,
        use_peephole: bool = False,
        keep_prob: float = 1.0,
        cell_clip: float = -1.0,
        num_proj: int = 0,
        time_major: bool = True,
        activation: str = "tanh",
        forget_bias: float = 0.0,
        is_training: bool = True,
        *,
        name: str | None = None,
    ):
        super().__init__(locals())

    def call(
        self,
        x: tf.Tensor,
        seq_length: Any = None,
        init_h: Any = None,
        init_c: Any = None,
        weight: Any = None,
        bias: Any = None,
    ) -> list[tf.Tensor]:
        """Runs the layer over all steps.

        Args:
          x: [T, B, D].
          seq_length: int [B]; in later steps, y and the gates are 0 and the state stays unchanged. None for all steps.
          init_h, init_c: initial states, [1, B, H], or [2, B, H] if bidirectional; None for zeros.
          weight, bias: tensors to use in place of the variables `w` and `b`.
        Returns:
          y, h, c, i, j, f, o and tanh(c), each [T, B, H]. If bidirectional, each [2, T, B, H], with
          ascending time in both directions.
        """
        weight, bias = (self._w if weight is None else weight), (self._b if bias is None else bias)
        if self.direction == _BIDIRECTIONAL:
            h, c = self._initial_states(init_h, x, 2), self._initial_states(init_c, x, 2)
            return recurrent.bidirectional_lstm(x, weight, bias, h, c, self.forget_bias, seq_length)
        (h,), (c,) = self._initial_states(init_h, x), self._initial_states(init_c, x)
        return recurrent.lstm(x, weight, bias, h, c, self.forget_bias, seq_length)

    def _make_weights(self, depth: int) -> None:
        leading, width = [2] if self.direction == _BIDIRECTIONAL else [], 4 * self.hidden_size
        glorot = tf.compat.v1.glorot_uniform_initializer(seed=10)
        self._w = self.add_weight("w", [*leading, depth + self.hidden_size, width], initializer=glorot)
        self._b = self.add_weight("b", [*leading, width], initializer="zeros")


class DynamicGRUV2(_DynamicLayer):
    """A gated recurrent unit: h ← (1 - update)·new + update·h.

    Here update = σ(W_z·x + b_z + U_z·h + c_z), reset is computed likewise, and
    new = tanh(W_n·x + b_n + reset·(U_n·h + c_n)), or tanh(W_n·x + b_n + U_n·(reset·h) + c_n) without `reset_after`.

    Variables, uniform within ±1/√H: `dynamicgruv2/weight_input` [D, 3H], `weight_hidden` [H, 3H], `bias_input` and
    `bias_hidden` [3H]. `dynamicbase/seq_length` is not trained and has no effect.

    Args:
      hidden_size: H.
      dtype: float16 or float32.
      direction: "UNIDIRECTIONAL".
      gate_order: order of the gates in the columns of weights: "zrh" for update, reset, new; or "rzh".
      reset_after: whether the reset gate multiplies the product of state and hidden weights; otherwise it multiplies
        the state.
      is_training: has no effect.
      cell_depth, keep_prob, cell_clip, num_proj, time_major, activation: only the defaults are allowed.
      name: name of the layer, for a model with several; by default the name of the class in lower case.
    Raises:
      ValueError: an argument has a value that is not allowed.
      NotImplementedError: `direction` is "BIDIRECTIONAL", for which the NPU stack has no kernel either.
    """

    gate_order, reset_after = _make_read_only_property("gate_order"), _make_read_only_property("reset_after")

    def __init__(
        self,
        hidden_size: int,
        dtype: Any,
        direction: str = _UNIDIRECTIONAL,
        cell_depth: int = 1,
        keep_prob: float = 1.0,
        cell_clip: float = -1.0,
        num_proj: int = 0,
        time_major: bool = True,
        activation: str = "tanh",
        gate_order: str = "zrh",
        reset_after: bool = True,
        is_training: bool = True,
        *,
        name: str | None = None,
    ):
        super().__init__(locals())

    def call(self, x: tf.Tensor, seq_length: Any = None, init_h: Any = None) -> list[tf.Tensor]:
        """Runs the layer over all steps.

        Args:
          x: [T, B, D].
          seq_length: int [B]; in later steps, y and the gates are 0 and the state stays unchanged. None for all steps.
          init_h: initial state, [B, H]; None for zeros.
        Returns:
          y, h, update, reset, new and the hidden part of new, each [T, B, H].
        """
        (h,) = self._initial_states(init_h, x)
        return recurrent.gru(x, self._of_gates, h, self._gru_rule, seq_length)

    @property
    def _gru_rule(self) -> GruRule:
        return GruRule(self.gate_order, self.reset_after)

    def _make_weights(self, depth: int) -> None:
        bound = self.hidden_size**-0.5
        width = 3 * self.hidden_size

        def make(name: str, *shape: int) -> tf.Variable:
            return self.add_weight(name, shape, initializer=tf.keras.initializers.RandomUniform(-bound, bound))

        self._of_gates = GruWeights(
            make("weight_input", depth, width),
            make("weight_hidden", self.hidden_size, width),
            make("bias_input", width),
            make("bias_hidden", width),
        )

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if self.gate_order not in GATE_ORDERS:
            expected = " or ".join(map(repr, GATE_ORDERS))
            raise self._error("gate_order is unknown", expected, repr(self.gate_order), "Use one of these.")
        if self.direction == _BIDIRECTIONAL:
            raise not_available_error(
                type(self).__name__, f"direction={_BIDIRECTIONAL!r}", "Use two layers, and tf.reverse_sequence."
            )


class DynamicAUGRU(DynamicGRUV2):
    """A `DynamicGRUV2` with the update gate (1 - attention)·update in place of update.

    Variables are named `dynamicaugru/...`. Arguments and errors are those of `DynamicGRUV2`.
    """

    def call(  # type: ignore[override]  # the documented order of arguments
        self, x: tf.Tensor, weight_att: Any, seq_length: Any = None, init_h: Any = None
    ) -> list[tf.Tensor]:
        """Runs the layer over all steps.

        Args:
          x, seq_length, init_h: as in `DynamicGRUV2`.
          weight_att: attention, [T, B].
        Returns:
          The results of `DynamicGRUV2`, with (1 - attention)·update inserted after update.
        """
        (h,) = self._initial_states(init_h, x)
        attention = tf.cast(weight_att, x.dtype)
        return recurrent.attentional_gru(x, attention, self._of_gates, h, self._gru_rule, seq_length)
