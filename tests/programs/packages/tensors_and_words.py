"""Files of Rust and C libraries: safetensors in turns, a tokenizer that is trained and read back, arrays in HDF5."""

import os
import shutil

import h5py
import numpy
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

model = torch.nn.Linear(3, 2, dtype=torch.float64)
torch.nn.init.constant_(model.weight, 0.5)
torch.nn.init.zeros_(model.bias)
for step in range(5):
    with torch.no_grad():
        model.weight += step
    os.makedirs(f"checkpoints/{step}", exist_ok=True)
    save_file(model.state_dict(), f"checkpoints/{step}/model.safetensors", {"step": str(step)})
    if step > 1:
        shutil.rmtree(f"checkpoints/{step - 2}")
save_file(model.state_dict(), "last.safetensors")
os.replace("checkpoints/3/model.safetensors", "last.safetensors")
with safe_open("last.safetensors", "pt") as file:
    print(sorted(os.listdir("checkpoints")), file.metadata(), file.get_tensor("weight").sum().item())
print(
    load_file("checkpoints/4/model.safetensors")["weight"].sum().item(),
    os.path.exists("checkpoints/3/model.safetensors"),
)

with open("words.txt", "w") as file:
    file.write("one two three two one one\n" * 5)
tokenizer = Tokenizer(models.WordLevel(unk_token="?"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.train(["words.txt"], trainers.WordLevelTrainer(special_tokens=["?"]))
tokenizer.save("tokenizer.json")
tokenizer.model.save(".")
print(Tokenizer.from_file("tokenizer.json").encode("one two four").ids, os.path.exists("vocab.json"))

for mode in ("w", "a", "a"):
    with h5py.File("arrays.h5", mode) as file:
        file[f"array {len(file)}"] = numpy.arange(4.0) * len(file)
with h5py.File("arrays.h5") as file:
    print({name: array[:].tolist() for name, array in file.items()})
