"""Keras on torch: fit with BatchNormalization, evaluate, predict, and a model in a file that has HDF5 in it."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy

keras.utils.set_random_seed(0)
keras.config.set_floatx("float64")
x = numpy.random.default_rng(0).normal(size=(60, 6))
y = (x[:, 0] > 0).astype("int64")
layers = [keras.Input((6,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
model = keras.Sequential(layers)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
keep = keras.callbacks.ModelCheckpoint("best.keras", monitor="val_loss", save_best_only=True)
history = model.fit(x, y, batch_size=16, epochs=3, validation_data=(x[:20], y[:20]), callbacks=[keep], verbose=0)
for name, values in history.history.items():
    print(name, [round(float(value), 5) for value in values])
print(model.predict(x, verbose=0).shape, [round(float(value), 5) for value in model.evaluate(x, y, verbose=0)])
again = keras.models.load_model("best.keras")
print(round(float(numpy.abs(again.predict(x, verbose=0)).sum()), 5))
