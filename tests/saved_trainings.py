"""What ways to train have in common: how their values are read, and how they are saved and restored."""

from __future__ import annotations

import tensorflow as tf


class SavedSession:
    """Of a TF 1 graph: has `graph`, `session`, `saver`, `all_variables`, and perhaps `variables` and `count`."""

    def values(self):
        return self.session.run(self.variables)

    def updates(self):
        return int(self.session.run(self.count))

    def everything(self):
        return self.session.run({variable.name: variable for variable in self.all_variables})

    def save(self, path):
        with self.graph.as_default():
            return self.saver.save(self.session, path, write_meta_graph=False)

    def restore(self, path):
        with self.graph.as_default():
            self.saver.restore(self.session, path)


class SavedObjects:
    """Of Keras optimizers: has `variables` by name, `optimizer` and `checkpoint`."""

    def values(self):
        return {name: variable.numpy() for name, variable in self.variables.items()}

    def updates(self):
        return int(self.optimizer.iterations)

    def save(self, path):
        return self.checkpoint.write(path)

    def restore(self, path):
        self.checkpoint.read(path)


class SavedModel(SavedObjects):
    """Of a compiled Keras `model` besides."""

    def fit(self, *arrays, **settings):
        """The loss scale before each batch."""
        scales = []
        note = tf.keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda *_: scales.append(float(self.optimizer.loss_scale))
        )
        self.model.fit(*arrays, shuffle=False, verbose=0, callbacks=[note], **settings)
        return scales

    def everything(self):
        variables = self.optimizer.variables
        own = variables() if callable(variables) else variables
        return {**self.values(), **{str(position): variable.numpy() for position, variable in enumerate(own)}}
