"""pytorch-lightning: Trainer with a best checkpoint, early stopping, a schedule, accumulation, a log; resumed."""

import os

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset, random_split

pl.seed_everything(7, verbose=False)


class Classifier(pl.LightningModule):
    def __init__(self, width=32, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(5, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
        ).double()

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        scores = self(batch[0])
        self.log("val_loss", torch.nn.functional.cross_entropy(scores, batch[1]), prog_bar=True)
        self.log("val_right", (scores.argmax(-1) == batch[1]).double().mean())

    def test_step(self, batch, index):
        self.log("test_loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch, index):
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


x = torch.randn(90, 5, dtype=torch.float64)
data = TensorDataset(x, (x.sum(1) + torch.randn(90) > 0).long())
train, validation = random_split(data, [61, 29])
train, validation = DataLoader(train, 8, shuffle=True), DataLoader(validation, 8)
keep = ModelCheckpoint("kept", "{epoch}-{val_loss:.6f}", monitor="val_loss", save_top_k=2, save_last=True)
stop = EarlyStopping("val_loss", patience=2)
options = {"accelerator": "cpu", "log_every_n_steps": 2, "enable_progress_bar": False, "enable_model_summary": False}
callbacks = [keep, stop, LearningRateMonitor("epoch")]
trainer = pl.Trainer(
    **options,
    max_epochs=8,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    logger=CSVLogger("logs"),
    callbacks=callbacks,
)
model = Classifier()
trainer.fit(model, train, validation)
print(trainer.current_epoch, stop.stopped_epoch, os.path.basename(keep.best_model_path), sorted(os.listdir("kept")))
print({name: value.item() for name, value in trainer.callback_metrics.items()})
print(trainer.test(model, validation, ckpt_path="best", verbose=False))
print(torch.cat(trainer.predict(model, validation)).tolist())
again = pl.Trainer(**options, max_epochs=10, logger=False, enable_checkpointing=False)
again.fit(Classifier(), train, validation, ckpt_path="kept/last.ckpt")
print(again.global_step, again.callback_metrics["val_loss"].item())
torch.save(again.model.state_dict(), "weights.pt")
