"""A tiny Llama that `HyperPodTrainer` trains, or transformers' own Trainer; run by `hyperpodrun` or torchrun."""

import json
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "recovery"))
from faults import Faults

if os.environ.get("PLAIN"):
    from transformers import Trainer as TrainerClass
else:
    from hyperpod_plugins.elastic import ElasticPolicy
    from hyperpod_plugins.transformers import HyperPodTrainer as TrainerClass
    from hyperpod_plugins.transformers import configure

    replicas = int(os.environ.get("REPLICAS", "0"))
    if replicas:
        policy = ElasticPolicy(max_replicas=replicas, scaling_timeout_s=0.0, faulty_scale_down_timeout_s=2.0)
        configure(elastic=policy)
    elif os.environ.get("SHARDS"):
        configure(hybrid_shard_degree=int(os.environ["SHARDS"]))

from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

torch.set_num_threads(1)
VOCABULARY, LENGTH = 64, 16


class Sentences(torch.utils.data.Dataset):
    """Sequences of different lengths, padded; the same in each process."""

    def __init__(self, count, seed=0):
        self.count, self.seed = count, seed

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed * 1000 + index)
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        length = 4 + index % (LENGTH - 4)
        ids[length:] = 0
        labels = ids.clone()
        labels[length:] = -100
        return {"input_ids": ids, "labels": labels, "attention_mask": (ids > 0).long()}


class Notes(TrainerCallback):
    """Notes logs; faults may happen in its events."""

    def __init__(self, faults):
        self.faults = faults

    def on_step_begin(self, args, state, control, **_):
        self.faults.at("step_begin", state.global_step)

    def on_step_end(self, args, state, control, **_):
        self.faults.at("step_end", state.global_step)
        if os.environ.get("REPLICAS"):
            self.faults.note(kind="step", step=state.global_step, rank=args.process_index, size=args.world_size)
            time.sleep(0.03)
        stop = self.faults.folder / "stop"
        if stop.exists() and state.global_step >= int(stop.read_text()):
            control.should_training_stop = True

    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            self.faults.note(kind="loss", step=state.global_step, loss=logs["loss"], size=args.world_size)

    def on_evaluate(self, args, state, control, **_):
        self.faults.at("evaluated", state.global_step)

    def on_save(self, args, state, control, **_):
        self.faults.at("saved", state.global_step)


def build_model(dropout=0.0):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            attention_dropout=dropout,
        )
    )


def main():
    faults = Faults()
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    given = {
        "output_dir": str(faults.folder / "out"),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
        "max_steps": 6,
        "seed": 7,
    }
    args = TrainingArguments(**(given | options))
    model = build_model(float(os.environ.get("DROPOUT", "0")))

    class FaultyTrainer(TrainerClass):
        def compute_loss(self, model, inputs, *args, **kwargs):
            where = "forward" if model.training else "evaluation"
            faults.at(where, self.state.global_step)
            result = super().compute_loss(model, inputs, *args, **kwargs)
            faults.at(f"after {where}", self.state.global_step)
            return result

    callbacks = [Notes(faults)]
    if os.environ.get("PATIENCE"):
        callbacks.append(EarlyStoppingCallback(int(os.environ["PATIENCE"])))
    if os.environ.get("LORA"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    trainer = FaultyTrainer(
        model=model,
        args=args,
        train_dataset=Sentences(int(os.environ.get("SAMPLES", "22"))),
        eval_dataset=Sentences(7, seed=1),
        callbacks=callbacks,
    )
    output = trainer.train(**json.loads(os.environ.get("TRAIN", "{}")))
    history = [
        {k: v for k, v in each.items() if not k.endswith(("runtime", "second"))} for each in trainer.state.log_history
    ]
    whole = lambda tensor: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # noqa: E731
    state = {
        name: whole(each.detach()).clone()
        for name, each in trainer.accelerator.unwrap_model(trainer.model).state_dict().items()
    }
    trainer.save_model()
    result = {"state": state, "history": history, "loss": output.training_loss, "step": output.global_step}
    torch.save(result, faults.folder / f"result-{args.process_index}.pt")


if __name__ == "__main__":
    main()
