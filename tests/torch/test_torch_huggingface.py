"""`SyncerCallback` in real trainers at a real server: Transformers, PEFT, TRL, Accelerate."""

import pytest

from tests.torch.island import Place, line_model, torch  # isort: split

import importlib
import sys

transformers = pytest.importorskip("transformers", reason="needs transformers; .ci/torch has it")

from syncer.errors import ConfigError, LocalProtocolError  # noqa: E402
from syncer.torch.trainers.huggingface import ISLAND_FILE, SyncerCallback  # noqa: E402
from tests.e2e.scripted import ServerProcess  # noqa: E402
from tests.e2e.scripted_server import ScriptedServer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries say to each other


class Words(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, place: int):
        row = (torch.arange(8) * (place % 5 + 1)) % 16
        return {"input_ids": row, "labels": row}


def small_llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=8))


def arguments(folder, **options):
    return transformers.TrainingArguments(**{
        "output_dir": str(folder), "max_steps": 100_000, "per_device_train_batch_size": 4,
        "use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no",
        "logging_steps": 2} | options)


def trainer_of(folder, callbacks, model=None, **options):
    return transformers.Trainer(model or small_llama(), arguments(folder, **options),
                                train_dataset=Words(), eval_dataset=Words(),
                                callbacks=callbacks)


def callback_at(server, **options) -> SyncerCallback:
    return SyncerCallback(f"127.0.0.1:{server.port}", **{"fragments": 2} | options)


class Ear(transformers.TrainerCallback):
    """Hears an event of the trainer after the callback under test."""

    def __init__(self, event: str, hear):
        setattr(self, event, lambda args, state, control, **_: hear(state))


def test_a_run_ends_the_training_and_the_last_checkpoint_is_its_final_model(tmp_path):
    """Steps and tokens are those of the optimizer, four batches each; the loss is told."""
    with ServerProcess(tmp_path, "--final-state", str(tmp_path / "final"), "--event-tape",
                       str(tmp_path / "tape"), "--sync-interval-steps", "2", steps=40) as server:
        callback = callback_at(server)
        trainer = trainer_of(tmp_path / "out", [callback], gradient_accumulation_steps=4,
                             save_strategy="steps", save_steps=100_000)
        trainer.train()
        assert server.wait() == 0
    steps = trainer.state.global_step
    assert steps < 100_000
    session = callback.island._joined()._session
    assert (session.steps, session.tokens) == (steps, steps * 4 * 4 * 8)
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / f"out/checkpoint-{steps}")
    floats = sum(parameter.numel() for parameter in saved.parameters())
    assert (tmp_path / "final").stat().st_size == 4 + 2 * 8 + 4 * floats
    final = torch.frombuffer(bytearray((tmp_path / "final").read_bytes()[4:]), dtype=torch.uint8)
    values = torch.cat([parameter.detach().reshape(-1) for parameter in saved.parameters()])
    for name, own in trainer.model.named_parameters():
        assert torch.equal(own, saved.get_parameter(name))
    assert sorted(values.tolist()) == sorted(of_fragments(final))
    assert '"loss":' in (tmp_path / "tape").read_text().replace('"loss":null', "")


def of_fragments(final: torch.Tensor) -> list[float]:
    """The values of a final state, without its head."""
    found: list[float] = []
    while len(final):
        size = int.from_bytes(bytes(final[:8].tolist()), "little")
        found += final[8:8 + 4 * size].clone().view(torch.float32).tolist()
        final = final[8 + 4 * size:]
    return found


def test_training_goes_on_from_a_checkpoint_of_the_trainer(tmp_path):
    class Enough(Exception):
        pass

    def stop(state) -> None:
        if state.global_step == 7:
            raise Enough

    with ServerProcess(tmp_path, "--min-round-interval-ms", "20", "--max-base-lag", "1000",
                       steps=200) as server:
        first = callback_at(server)
        options = {"save_strategy": "steps", "save_steps": 4}
        trainer = trainer_of(tmp_path / "out", [first, Ear("on_step_end", stop)], **options)
        with pytest.raises(Enough), first:
            trainer.train()
        with pytest.raises(LocalProtocolError, match="was closed"):
            first.island.tokens(1), first.island._boundary()
        saved = torch.load(tmp_path / "out/checkpoint-4" / ISLAND_FILE, weights_only=True)
        at_start = []
        second = callback_at(server)
        ear = Ear("on_train_begin", lambda state: at_start.append(
            (state.global_step, second.island.status.step, second.island._joined().resumed)))
        again = trainer_of(tmp_path / "out", [second, ear], **options)
        again.train(resume_from_checkpoint=True)
        assert server.wait() == 0
    resumed = all(saved["fragments"])
    assert at_start == [(4, 4, resumed)]
    session = second.island._joined()._session
    assert session.steps == again.state.global_step
    assert session.tokens == again.state.num_input_tokens_seen == session.steps * 4 * 8


def test_a_checkpoint_without_the_islands_part_is_told_of(tmp_path):
    trainer = trainer_of(tmp_path, [], max_steps=2, save_strategy="steps")
    trainer.train()
    with ServerProcess(tmp_path, "--sync-interval-steps", "2", steps=4) as server:
        again = trainer_of(tmp_path, [callback_at(server)])
        with pytest.warns(UserWarning, match=r"checkpoint-2 has no syncer_island\.pt"):
            again.train(resume_from_checkpoint=True)
        assert server.wait() == 0


def test_an_own_best_model_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, [SyncerCallback("127.0.0.1:1")], load_best_model_at_end=True,
                         save_strategy="steps", eval_strategy="steps", save_steps=2, eval_steps=2)
    with pytest.raises(ConfigError, match="leave it out"):
        trainer.train()


def test_a_step_that_accelerate_leaves_out_is_none():
    """Accumulated batches, and a step that its grad scaler skips."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = line_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    prepared = accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=scaler)
    with ScriptedServer() as server, Place(server, model, prepared) as place:
        for batch in range(8):
            with accelerator.accumulate(model):
                scaler.scale(model(torch.ones(2, 4)).sum()).backward()
                if batch == 3:
                    model[0].weight.grad[0, 0] = float("inf")
                place.island.tokens(5)
                prepared.step()
                prepared.zero_grad()
            assert prepared.step_was_skipped == (batch in (3, 4))
        session = place.island._joined()._session
        assert (session.steps, session.tokens) == (3, 40)


def test_adapters_alone_are_in_the_run_of_a_trl_trainer(tmp_path):
    peft = pytest.importorskip("peft")
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, "the": 3, "sea": 4, "is": 5, "blue": 6}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>")),
        bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>")
    model = small_llama()
    base = {name: value.clone() for name, value in model.state_dict().items()}
    with ServerProcess(tmp_path, "--sync-interval-steps", "2", steps=6) as server:
        callback = callback_at(server, tokens_per_step=16)
        trainer = trl.SFTTrainer(
            model, trl.SFTConfig(
                str(tmp_path / "out"), max_steps=100_000, per_device_train_batch_size=2,
                use_cpu=True, disable_tqdm=True, report_to="none", save_strategy="no",
                max_length=8, bf16=False),
            train_dataset=datasets.Dataset.from_dict({"text": ["the sea", "sea is blue"] * 64}),
            processing_class=tokenizer, callbacks=[callback],
            peft_config=peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        trainer.train()
        assert server.wait() == 0
    names = [t.name for f in callback.island._joined().layout.fragments for t in f.tensors]
    assert len(names) == 4
    assert all("lora_" in name for name in names)
    trained = dict(trainer.model.named_parameters())
    assert any(trained[name].abs().max() > 0 for name in names if "lora_B" in name)
    merged = trainer.model.base_model.model.state_dict()
    for name, value in base.items():
        found = [merged[each] for each in (name, name.replace(".weight", ".base_layer.weight"))
                 if each in merged]
        assert all(torch.equal(each, value) for each in found)
        assert found


def test_without_the_library_there_is_one_sentence(monkeypatch):
    from syncer.torch.trainers import huggingface  # noqa: PLC0415

    for name in [each for each in sys.modules if each.partition(".")[0] == "transformers"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, huggingface.__name__)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'transformers\[torch\]'"):
        importlib.import_module(huggingface.__name__)
