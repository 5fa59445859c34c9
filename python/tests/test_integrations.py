"""Trainer hooks against the real packages; each is skipped where its package is not installed."""

import json

import drivetrain as dt
import pytest

torch = pytest.importorskip("torch")


def same(a, b):
    """Nested states with equal types and bits."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return dict.keys(a) == dict.keys(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return a == b


class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        x = torch.full((4,), float(i))
        return {"x": x, "labels": x.sum().reshape(1) / 10}


def lightning_module(lightning):
    class Module(lightning.LightningModule):
        def __init__(self, width=4):
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(width, 1)

        def training_step(self, batch, index):
            return ((self.layer(batch["x"]) - batch["labels"]) ** 2).mean()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    return Module


def test_lightning_trains_saves_and_continues(tmp_path):
    lightning = pytest.importorskip("lightning")
    from drivetrain.integrations.lightning import CheckpointIO
    from lightning.pytorch.callbacks import ModelCheckpoint

    module = lightning_module(lightning)
    batches = torch.utils.data.DataLoader(Batches(), batch_size=4)
    quiet = dict(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )

    def trainer(epochs, io):
        keep = ModelCheckpoint(tmp_path / "c", save_top_k=1, save_last=True, filename="{epoch}")
        return lightning.Trainer(max_epochs=epochs, plugins=[io], callbacks=[keep], **quiet)

    torch.manual_seed(1)
    first = module()
    run = trainer(2, CheckpointIO())
    run.fit(first, batches)
    io = CheckpointIO()
    last = tmp_path / "c" / "last.ckpt"
    with dt.Checkpointer(last) as ckpt:
        assert ckpt.steps() == [8] and ckpt.verify(8).ok
    found = io.load_checkpoint(last)
    assert found["global_step"] == 8 and found["hyper_parameters"] == {"width": 4}
    assert same(found["state_dict"], first.state_dict())
    assert same(found["optimizer_states"][0], run.optimizers[0].state_dict())
    # only the best and the last stay
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["epoch=1.ckpt", "last.ckpt"]

    # A run that goes on from the checkpoint ends where one without a break does.
    torch.manual_seed(1)
    whole = module()
    trainer(3, CheckpointIO(blocking=True)).fit(whole, batches)
    resumed = module()
    trainer(3, CheckpointIO()).fit(resumed, batches, ckpt_path=str(last), weights_only=False)
    assert same(resumed.state_dict(), whole.state_dict())


def test_lightning_leaves_foreign_files(tmp_path):
    pytest.importorskip("lightning")
    from drivetrain.integrations.lightning import CheckpointIO

    io = CheckpointIO(blocking=True)
    io.save_checkpoint({"global_step": 3, "w": torch.ones(2)}, tmp_path / "a")
    io.save_checkpoint({"global_step": 3, "w": torch.zeros(2)}, tmp_path / "a")
    assert same(io.load_checkpoint(tmp_path / "a")["w"], torch.zeros(2))
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.warns(UserWarning, match="notes.txt"):
        io.remove_checkpoint(tmp_path / "a")
    assert (tmp_path / "a" / "notes.txt").exists()
    (tmp_path / "a" / "notes.txt").unlink()
    io.remove_checkpoint(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    with pytest.raises(dt.NotFound):
        io.load_checkpoint(tmp_path / "a")


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        y = self.layer(x)
        return {"loss": ((y - labels) ** 2).mean(), "logits": y}


def test_hugging_face_saves_and_continues(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from drivetrain.integrations.huggingface import CheckpointCallback

    begun = []

    class Begin(transformers.TrainerCallback):
        """Looks at the model after our hook."""

        def on_train_begin(self, args, state, control, model=None, **live):
            begun.append((state.global_step, {k: v.clone() for k, v in model.state_dict().items()}))

    def train(steps, seed, root):
        torch.manual_seed(seed)
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path / "hf"),
            max_steps=steps,
            per_device_train_batch_size=4,
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_only_model=True,
            learning_rate=0.01,
        )
        hook = CheckpointCallback(root, keep=dt.Keep(last=9))
        trainer = transformers.Trainer(
            Regression(),
            args,
            train_dataset=Batches(),
            eval_dataset=Batches(),
            callbacks=[hook, Begin()],
        )
        trainer.train()
        return trainer, hook

    first, hook = train(6, 1, tmp_path / "ckpt")
    assert hook.restored_step is None
    with dt.Checkpointer(tmp_path / "ckpt") as ckpt:
        assert ckpt.steps() == [2, 4, 6] and ckpt.verify(6).ok
    manifest = json.loads((tmp_path / "ckpt" / "step-00000006" / "manifest.json").read_text())
    assert manifest["metrics"]["eval_loss"] > 0
    # Other initial weights: what it begins with can only come from the checkpoint.
    again, hook = train(9, 2, tmp_path / "ckpt")
    assert hook.restored_step == 6 and again.state.global_step == 9
    assert begun[0][0] == 0 and begun[1][0] == 6
    assert same(begun[1][1], first.model.state_dict())


class Noted(Regression):
    """Notes the samples that it is trained on; dropout shows whether generators go on."""

    def __init__(self, seen):
        super().__init__()
        self.seen, self.dropout = seen, torch.nn.Dropout(0.3)

    def forward(self, x, labels):
        if self.training:
            self.seen.append(x[:, 0].tolist())
        return super().forward(self.dropout(x), labels)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_hugging_face_goes_on_with_the_very_samples(tmp_path, accumulation):
    """Interrupted in the second and third epoch, against a run that was not."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from drivetrain.integrations.huggingface import CheckpointCallback

    def train(steps, root, stop=None):
        class Stop(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **live):
                control.should_training_stop |= state.global_step == stop

        seen = []
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path / "hf"),
            max_steps=steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulation,
            save_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_only_model=True,
            learning_rate=0.01,
        )
        torch.manual_seed(5)
        trainer = transformers.Trainer(
            Noted(seen),
            args,
            train_dataset=Batches(),
            callbacks=[CheckpointCallback(root, keep=dt.Keep(last=2)), Stop()],
        )
        trainer.train()
        return trainer, seen

    per_epoch = 8 // accumulation
    steps, stops = per_epoch * 3 + 2, [per_epoch + 3, per_epoch * 2 + 1, None]
    whole, want = train(steps, tmp_path / "whole")
    got = []
    for stop in stops:
        trainer, seen = train(steps, tmp_path / "parts", stop)
        got += seen
        assert trainer.state.epoch == pytest.approx(trainer.state.global_step / per_epoch)
    assert got == want
    assert same(trainer.model.state_dict(), whole.model.state_dict())


def test_accelerate_state_goes_there_and_back(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    from drivetrain.integrations.huggingface import accelerate_state

    def prepared(seed):
        torch.manual_seed(seed)
        accelerator = accelerate.Accelerator(cpu=True)
        model = Regression()
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        return accelerator, model, optimizer, scheduler

    accelerator, model, optimizer, scheduler = prepared(1)
    batch = Batches()[3]
    accelerator.backward(model(batch["x"][None], batch["labels"][None])["loss"])
    optimizer.step()
    scheduler.step()
    with dt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, accelerate_state(accelerator)).wait()
        other, model_2, optimizer_2, scheduler_2 = prepared(2)
        assert not same(model_2.state_dict(), model.state_dict())
        ckpt.restore(accelerate_state(other))
    assert same(model_2.state_dict(), model.state_dict())
    assert same(optimizer_2.state_dict()["state"], optimizer.state_dict()["state"])
    assert same(scheduler_2.state_dict(), scheduler.state_dict())
