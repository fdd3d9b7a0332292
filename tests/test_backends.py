"""The attention-backend tables against the engines' own source, and against themselves.

Run: pytest tests/test_backends.py (half a minute; reads the installed engines' files, starts nothing)
"""
import itertools
import re
import shutil
from pathlib import Path

import pytest
from k2eagle import backends
from k2eagle.backends import CAPABILITIES, READ, attention_backend, backend_table, check_installed, limits
from published import published

KIMI, DEEPSEEK, LLAMA = "KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM", "LlamaForCausalLM"
MHA_DRAFTER, MLA_DRAFTER = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"
BOTH = pytest.mark.parametrize("engine", ["sglang", "vllm"])
FILES = {"sglang": {file for files in backends._SG.values() for file in files},
         "vllm": {file for files in backends._VL.values() for file in files} | {row.source for row in backends._LIMITS_VLLM}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    "The files of each installed engine that `check_installed` reads, copied, and the engine's version."
    copies = {}
    for engine, files in FILES.items():
        version, root = backends.installed(engine)
        copy = tmp_path_factory.mktemp(engine)
        for file in files:
            if (root / file).is_file():
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / file, copy / file)
        copies[engine] = (copy, version)
    return copies


def changed(folders, tmp_path, engine: str, file: str, old: str, new: str) -> tuple:
    "A copy of an engine's files in which one piece of text is another."
    copy, version = folders[engine]
    shutil.copytree(copy, tmp_path / "copy")
    path = tmp_path / "copy" / file
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{file} no longer has {old!r}; name another place to change"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return tmp_path / "copy", version


@BOTH
def test_tables_say_what_the_installed_engine_says(engine):
    assert check_installed(engine) == [], str(check_installed(engine))


@pytest.mark.exhaustive
@pytest.mark.parametrize("version, comparisons", [("0.5.9", 5), ("0.5.12", 37), ("0.5.14", 37), ("0.5.18", 45)])
def test_tables_say_what_published_versions_say(version, comparisons, tmp_path, monkeypatch):
    "What the newest version keeps where older ones had it is compared there, too; the rest is said to be unread."
    asked, compare = [], backends._differs
    monkeypatch.setattr(backends, "_differs", lambda *given: asked.append(given) or compare(*given))
    found = check_installed("sglang", published(f"sglang=={version}", r"sglang/srt/.*\.py", tmp_path) / "sglang", version)
    assert len(asked) == comparisons and {one.code for one in found} <= {"backend-source-unread"}, str(found)


@BOTH
def test_reading_an_engine_imports_nothing_of_it(engine, folders):
    import sys
    check_installed(engine, *folders[engine])
    assert not {name for name in sys.modules if name.split(".")[0] == engine}


SGLANG_BASE, COMMON = "srt/arg_groups/model_override_base.py", "srt/utils/common.py"
DEEPSEEK_FILE, FLASH = "srt/arg_groups/model_overrides/deepseek_v2.py", "MLAPrefillBackendEnum.FLASH_ATTN"


@pytest.mark.parametrize("engine, file, old, new, subject", [
    ("sglang", SGLANG_BASE, 'return "flashinfer"\n        elif get_platform().is_hip:',
     'return "fa4"\n        elif get_platform().is_hip:', "MLA on 10.0"),
    ("sglang", SGLANG_BASE, 'return "trtllm_mha"', 'return "fa4"', "MHA on 10.0"),
    ("sglang", SGLANG_BASE, "get_platform().is_sm100\n", "get_platform().is_blackwell\n", "MHA on 12.0"),
    ("sglang", SGLANG_BASE, "or cfg.speculative_eagle_topk is not None", "or True", "MHA on 10.0, topk None, with"),
    ("sglang", COMMON, "device_capability_majors=[10, 11, 12]", "device_capability_majors=[10]", "is_blackwell_supported"),
    ("sglang", COMMON, "cfg.speculative_eagle_topk == 1\n", "cfg.speculative_eagle_topk == 4\n", "MHA on 9.0, topk 1"),
    ("sglang", DEEPSEEK_FILE, '"KimiK25ForConditionalGeneration",', "", "models with a backend of their own"),
    ("sglang", DEEPSEEK_FILE, '"attention_backend"] = "trtllm_mla"', '"attention_backend"] = "cutedsl_mla"', "their backend"),
    ("sglang", DEEPSEEK_FILE, "get_platform().is_sm100:", "get_platform().is_blackwell:", "their backend"),
    ("sglang", "srt/arg_groups/overrides.py", "[16, 32, 64, 128]", "[16, 32, 64]", "pages of trtllm_mha"),
    ("sglang", "srt/arg_groups/speculative_hook.py", '("flashinfer", "fa3", "triton")', '("flashinfer", "fa3")', "trees with pages"),
    ("sglang", "srt/speculative/draft_utils.py", '"trtllm_mla": self._create_trtllm_mla_decode_backend,', "", "backends that draft"),
    ("sglang", "kernels/ops/attention/extend_attention.py", "CUDA_CAPABILITY[0] == 12", "CUDA_CAPABILITY[0] == 13", "Triton prefill"),
    ("vllm", "platforms/cuda.py", "device_capability.major == 12", "device_capability.major == 13", "MLA on 12.0"),
    ("vllm", "platforms/cuda.py", "AttentionBackendEnum.FLASHINFER,\n                AttentionBackendEnum.FLASH_ATTN,",
     "AttentionBackendEnum.FLASH_ATTN,\n                AttentionBackendEnum.FLASHINFER,", "MHA on 10.0"),
    ("vllm", "platforms/interface.py", f"priorities = [{FLASH}]", "priorities = [MLAPrefillBackendEnum.FLASHINFER]", "MLA prefill on 9.x"),
    ("vllm", "v1/attention/backends/mla/flashinfer_mla.py", "capability.major == 10", "capability.major in (10, 12)", "GPUs of FLASHINFER_MLA"),
    ("vllm", "v1/attention/backends/mla/cutlass_mla.py", "return [128]", "return [64]", "blocks of CUTLASS_MLA"),
    ("vllm", "v1/attention/ops/flashmla.py", "is_device_capability_family(90)", "has_device_capability(90)", "GPUs of FLASHMLA")])
def test_a_changed_engine_is_noticed(folders, tmp_path, engine, file, old, new, subject):
    seen = check_installed(engine, *changed(folders, tmp_path, engine, file, old, new))
    assert any(one.code == "backend-table-differs" and one.subject.startswith(subject) for one in seen), str(seen) or "nothing found"


@pytest.mark.parametrize("engine, file, part", [("sglang", SGLANG_BASE, "sglang_choices"),
                                                ("sglang", "srt/speculative/draft_utils.py", "sglang_limits"),
                                                ("vllm", "platforms/cuda.py", "vllm_lists"), ("vllm", "v1/attention/ops/flashmla.py", "vllm_valid")])
@pytest.mark.parametrize("content", [None, "def broken(:\n", "", b"\xff\xfe\x00"])
def test_source_that_cannot_be_read_is_said(folders, tmp_path, engine, file, part, content):
    copy, version = folders[engine]
    shutil.copytree(copy, tmp_path / "copy")
    path = tmp_path / "copy" / file
    path.unlink() if content is None else path.write_bytes(content if isinstance(content, bytes) else content.encode())
    seen = check_installed(engine, tmp_path / "copy", version)
    assert (part, "backend-source-unread") in {(one.subject, one.code) for one in seen}, str(seen)


def test_an_empty_folder_is_not_agreement(tmp_path):
    assert len(check_installed("sglang", tmp_path, "0.5.23")) == len(backends.CHECKS["sglang"])


# engine, version, model, GPU, role, phase, what it chooses, verdict: what users met, as the threads and the source tell it
MET = [("sglang", "0.5.8", DEEPSEEK, "12.0", "target", "prefill", "triton", "dies"),        # sglang PR #14311
       ("sglang", "0.5.9", KIMI, "12.0", "target", "prefill", "triton", "slow"),
       ("sglang", "0.5.8", KIMI, "9.0", "target", "prefill", "fa3", "dies"),                # no model file
       ("sglang", "0.5.9", KIMI, "10.0", "target", "decode", "trtllm_mla", "works"),
       ("sglang", "0.5.14", MHA_DRAFTER, "10.0", "draft", "decode", "trtllm_mla", "dies"),  # sglang issue #23490
       ("sglang", "0.5.14", MLA_DRAFTER, "10.0", "draft", "decode", "trtllm_mla", "works"),
       ("sglang", "0.5.6.post2", LLAMA, "12.0", "target", "prefill", "trtllm_mha", "dies"),  # sglang PR #14842
       ("sglang", "0.4.10.post2", DEEPSEEK, "10.0", "target", "prefill", "flashinfer", "works"),
       ("sglang", "0.5.23", LLAMA, "8.0", "target", "decode", "flashinfer", "works"),
       ("sglang", "0.5.9", MHA_DRAFTER, "9.0", "draft", "decode", "fa3", "dies"),           # no EAGLE-3 for Kimi before 0.5.10
       ("sglang", "0.5.23", MHA_DRAFTER, "cpu", "draft", "decode", "torch_native", "dies"),
       ("vllm", "0.13.0", DEEPSEEK, "10.0", "target", "decode", "CUTLASS_MLA", "works"),
       ("vllm", "0.16.0", KIMI, "10.0", "target", "decode", "FLASHINFER_MLA", "works"),
       ("vllm", "0.16.0", KIMI, "12.0", "target", "decode", "TRITON_MLA", "slow"),
       ("vllm", "0.16.0", MHA_DRAFTER, "9.0", "draft", "decode", "FLASH_ATTN", "dies"),     # no EAGLE-3 for Kimi before 0.18
       ("vllm", "0.9.2", DEEPSEEK, "9.0", "target", "decode", "FLASHMLA", "works"),
       ("vllm", "0.11.0", DEEPSEEK, "10.3", "target", "decode", "TRITON_MLA", "slow"),
       ("vllm", "0.32.0", MHA_DRAFTER, "10.0", "draft", "decode", "FLASHINFER", "works"),
       ("vllm", "0.22.1", KIMI, "cpu", "target", "decode", "none", "dies")]


@pytest.mark.parametrize("engine, version, arch, capability, role, phase, name, verdict", MET)
def test_what_users_met(engine, version, arch, capability, role, phase, name, verdict):
    choice = attention_backend(engine, version, arch, capability, role, phase, **({"target": KIMI} if role == "draft" else {}))
    assert (choice.name, choice.verdict) == (name, verdict), choice
    assert choice.source.startswith(f"{engine} {version}, ")


EVERY = [(engine, version, *rest) for engine, versions in READ.items() for version in versions for rest in itertools.product(
    (KIMI, DEEPSEEK, LLAMA), CAPABILITIES, ("prefill", "decode"), (None, MHA_DRAFTER, MLA_DRAFTER), (None, 1, 4))]


def asked(engine, version, target, capability, phase, drafter, topk=None, **facts):
    "Ask for the target, or for a drafter of it."
    role = "draft" if drafter else "target"
    return attention_backend(engine, version, drafter or target, capability, role, phase, topk=topk, target=target, **facts)


def test_every_question_has_an_answer_with_its_source():
    for question in EVERY:
        choice = asked(*question)
        assert choice.status in ("read", "thread", "inferred", "run") and ", " in choice.source, (question, choice)
        assert choice.verdict == "works" or choice.why, (question, choice)
        assert not choice.note, (question, choice.note)


OPTIONS = {"attention-backend": "attention_backend", "prefill-attention-backend": "prefill_attention_backend",
           "decode-attention-backend": "decode_attention_backend", "speculative-draft-attention-backend": "draft_attention_backend",
           "speculative-eagle-topk": "topk"}


def test_following_the_advice_ends_in_something_that_runs():
    tried = 0
    for question in EVERY:
        facts, choice = {"topk": question[-1]}, asked(*question)
        for _ in range(3):
            said = re.findall(r"--([a-z-]+) (\w+)", choice.set_instead.split(", or")[0])
            options = {OPTIONS[name]: None if value == "out" else value for name, value in said if name in OPTIONS}  # "leave … out"
            if not options or choice.verdict == "works":
                break
            topk = int(options.pop("topk", 0)) or (1 if "with topk 1" in choice.set_instead else facts["topk"])
            facts, tried = {**facts, **options, "topk": topk}, tried + 1
            choice = asked(*question[:-1], **facts)
        if facts != {"topk": question[-1]}:
            assert choice.verdict != "dies", (question, facts, choice)
    assert tried > 300, tried


def reachable(fault):
    "Questions, with and without forced backends, that a fault may be about."
    forced = [{}] + [{option: name} for name in fault.names[:3] for option in ("attention_backend", "draft_attention_backend")]
    split = [{"prefill_attention_backend": "triton", "decode_attention_backend": "flashinfer"}, {"fp8_kv": True}, {"cuda": "12.6"},
             {"attention_backend": "FLASHMLA"}, {"attention_backend": "trtllm_mla", "speculative": False}]
    known = {None, *backends.backend_names(fault.engine)}
    options = [facts for facts in forced + split if all(value in known for name, value in facts.items() if name.endswith("_backend"))]
    versions = [version for version in READ[fault.engine] if backends._within(fault, backends.Version(version))]
    spread = itertools.product(versions, CAPABILITIES, (DEEPSEEK, LLAMA), ("target", "draft"), ("prefill", "decode"), options, (None, 4))
    for version, capability, target, role, phase, facts, topk in spread:
        for arch in (MHA_DRAFTER, MLA_DRAFTER) if role == "draft" else (target,):
            yield attention_backend(fault.engine, version, arch, capability, role, phase, target=target, topk=topk, **facts)


@pytest.mark.parametrize("fault", backends.FAULTS, ids=lambda fault: f"{fault.engine}-{fault.code}-{fault.since}")
def test_every_fault_is_met_by_some_question(fault):
    assert any((choice.why, choice.set_instead, choice.verdict) == (fault.why, fault.instead, fault.verdict) for choice in reachable(fault)), fault


def test_the_engine_s_own_options_are_refused_when_they_do_not_fit():
    for capability in ("8.0", "9.0", "10.0", "12.0"):
        wrong = {"sglang": "fa3" if capability in ("10.0", "12.0") else "trtllm_mla", "vllm": "FLASHMLA" if capability != "9.0" else "CUTLASS_MLA"}
        for engine, name in wrong.items():
            choice = attention_backend(engine, None, KIMI, capability, phase="decode", attention_backend=name)
            assert choice.name == name and choice.verdict == "dies" and "leave" in choice.set_instead, choice


@BOTH
def test_versions_between_and_beyond(engine):
    for version in ("0.0.1", "0.5.7", "0.5.20", "0.10.0", "0.19", "99.0", "0.5.23.dev4+cu128", READ[engine][-1] + "+cu130"):
        choice = attention_backend(engine, version, DEEPSEEK, "9.0")
        known = version.split("+")[0] in READ[engine]
        assert bool(choice.note) != known, (version, choice)
        if version in ("0.0.1", "99.0"):
            assert choice.status == "inferred" and "stands for it" in choice.note


@BOTH
def test_tables_hold_together(engine):
    rows = [row for row in backends.RULES + backends.FAULTS + backends.LIMITS if row.engine == engine]
    for row in rows:
        assert row.since in READ[engine] and row.until in (None, *READ[engine]), row
        assert row.source and getattr(row, "when", "") in backends.CONDITIONS, row
    for version in READ[engine]:
        for row in backends.LIMITS:
            if row.engine == engine and backends._within(row, backends.Version(version)):
                assert limits(engine, version, row.backend)["status"] == "read"
    for fault in backends.FAULTS:
        assert fault.verdict in ("dies", "slow", "works") and fault.status in ("read", "thread", "inferred", "run"), fault


@BOTH
def test_tables_are_read_without_colour(engine):
    table = backend_table(engine)
    assert list(table.index) == list(CAPABILITIES)
    for cell in table.drop(columns="set instead").to_numpy().ravel():
        assert re.fullmatch(r"((prefill |decode )?(✔ \w+|▲ \w+ \(slow\)|✖ [\w ]+ \(dies\))(, )?){1,2}", cell), cell


def test_module_is_light():
    import subprocess
    import sys
    code = "import sys; import k2eagle.backends; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent).returncode == 0
