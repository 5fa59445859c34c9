"""Hooks for trainers, one line each; a module imports its trainer, so import the one you use.

`drivetrain.integrations.lightning`: `Trainer(plugins=[CheckpointIO()])`.
`drivetrain.integrations.huggingface`: `Trainer(callbacks=[CheckpointCallback(root)])`, and
`accelerate_state(accelerator)` for `Checkpointer.save` and `restore`.
"""
