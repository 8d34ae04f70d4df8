"""Saving and loading wrapped models of transformers.

`config.json` gets an entry "temper" that records what `temper.wrap` did, and the folder gets a short file with which
the Auto classes build the model from the installed temper (`trust_remote_code=True`). The weights of the sites are
saved with the others. Nothing here imports transformers before there is a model of it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from temper.carrier import SITES
from temper.config import RouterConfig
from temper.gates import with_vector_gates
from temper.router import Router

# The key in config.json; its value is a list if the model was wrapped several times, stack by stack.
ENTRY = "temper"
FIELDS = ("blocks", "sites", "reduce", "preset", "router")
# The file that the Auto classes are pointed to.
STUB = "modeling_temper"


def mark(module: nn.Module) -> None:
    """Records in the configuration of a transformers model what was done to it, and extends its `save_pretrained`."""
    config = getattr(module, "config", None)
    if not hasattr(module, "save_pretrained") or not hasattr(config, "save_pretrained"):
        return
    from temper.wrap import records_of

    found = records_of(module)
    if not found:
        return
    entries = [_entry(record, configs) for record, configs in found]
    setattr(config, ENTRY, entries[0] if len(entries) == 1 else entries)
    for site in _sites(module):
        # Marks the parameters as initialized; transformers would reset them otherwise.
        site._is_hf_initialized = True  # type: ignore[assignment]
    if not isinstance(module, Wrapped):
        module.__class__ = wrapped_class(type(module))


def unmark(module: nn.Module) -> None:
    """Undoes `mark`."""
    for child in module.modules():
        if isinstance(child, Wrapped):
            # Unless something else, such as FSDP, has made it a class of its own.
            if type(child) is wrapped_class(type(child).plain):
                child.__class__ = type(child).plain
            if hasattr(child.config, ENTRY):
                delattr(child.config, ENTRY)


def load_pretrained(folder: str | Path, *, model_class: type | None = None, **options: Any) -> Any:
    """Loads a wrapped transformers model from a folder written by its `save_pretrained`, with equal outputs.

    Args:
        folder: on disk, or a name on the hub.
        model_class: the class of the model that was wrapped, if it is not one of transformers' own.
        options: of `from_pretrained`, such as `dtype=torch.bfloat16` (the sites stay in float32) or `device_map`.
    """
    transformers = _transformers()
    hub = {key: options[key] for key in ("revision", "token", "cache_dir", "local_files_only") if key in options}
    if isinstance(folder, Path) or os.path.exists(folder):
        _check_folder(Path(folder))
    config = options.pop("config", None)
    if config is None:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, **hub)
    if not getattr(config, ENTRY, None):
        raise ValueError(
            f"{folder} holds no wrapped model: its config.json has no entry {ENTRY!r}. Expected a folder that "
            "save_pretrained of a wrapped model has written"
        )
    if model_class is None:
        names = getattr(config, "architectures", None) or [None]
        # By name from the library itself: no code of the folder runs.
        model_class = getattr(transformers, str(names[0]), None)
        if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
            raise ValueError(
                f"{folder} is a model of the class {names[0]}, which transformers {transformers.__version__} does not "
                "have; give load_pretrained model_class="
            )
    wants_info = options.pop("output_loading_info", False)
    options["output_loading_info"] = True
    model, info = wrapped_class(model_class).from_pretrained(folder, config=config, **options)
    if missing := sorted(key for key in info["missing_keys"] if f".{SITES}." in f".{key}"):
        raise ValueError(f"{folder}: {len(missing)} tensors of the sites are missing ({', '.join(missing[:3])})")
    return (model, info) if wants_info else model


class AutoWrapped:
    """The object a stub gives to one of transformers' Auto classes in place of a model class."""

    name: str

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: the files that make a folder loadable are written by `Wrapped.save_pretrained`."""

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, config: Any, **options: Any) -> Any:
        return cls._class_for(config).from_pretrained(folder, *args, config=config, **options)

    @classmethod
    def _from_config(cls, config: Any, **options: Any) -> Any:
        # What the Auto classes' `from_config` calls.
        return cls._class_for(config)._from_config(config, **options)

    @classmethod
    def _class_for(cls, config: Any) -> Any:
        known = getattr(_transformers(), cls.name)._model_mapping[type(config)]
        classes = known if isinstance(known, tuple | list) else (known,)
        saved = getattr(config, "architectures", None) or ()
        return wrapped_class(next((each for each in classes if each.__name__ in saved), classes[0]))

    # Auto classes add a generation mixin to classes that lack one; the class behind this one has its own.
    prepare_inputs_for_generation = generate = None


def auto_class(name: str) -> type[AutoWrapped]:
    """For a stub: the class that the Auto class of this name is pointed to."""
    return type(name, (AutoWrapped,), {"name": name})


class Loadable:
    """The base of our transformers models: it saves a stub and loads gates of older versions."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: the files that make a folder loadable are written by `save_pretrained`."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **options: Any) -> Any:
        folder = pretrained_model_name_or_path
        older = older_weights(folder) if "state_dict" not in options else None
        if older is None:
            return super().from_pretrained(folder, *args, **options)  # type: ignore[misc]
        options.setdefault("config", cls.config_class.from_pretrained(folder))  # type: ignore[attr-defined]
        return super().from_pretrained(None, *args, state_dict=older, **options)  # type: ignore[misc]


class Wrapped(Loadable):
    """The mixin of a wrapped transformers model."""

    plain: type[Any]
    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        assert isinstance(self, nn.Module)
        entries = getattr(self.config, ENTRY, None)
        if entries:
            _repeat(self, entries)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is created on demand, so no module defines it by name.
        return _new, (type(self).plain,), self.__dict__

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **options: Any) -> Any:
        assert isinstance(self, nn.Module)
        mark(self)
        autos = _auto_classes(self)
        if autos and is_main_process and not os.path.isfile(save_directory):
            os.makedirs(save_directory, exist_ok=True)
            lines = (f'{name} = auto_class("{name}")' for name in autos)
            write_stub(Path(save_directory), STUB, "from temper.pretrained import auto_class", *lines)
        before = getattr(self.config, "auto_map", None)
        if autos:
            self.config.auto_map = {**(before or {}), **{name: f"{STUB}.{name}" for name in autos}}
        try:
            return super().save_pretrained(save_directory, is_main_process, *args, **options)  # type: ignore[misc]
        finally:
            if autos:
                self.config.auto_map = before
                if before is None:
                    del self.config.auto_map

    def initialize_weights(self) -> None:
        # Called after loading: tensors missing from the files get initial values, and constant tables are rebuilt.
        assert isinstance(self, nn.Module)
        for site in _sites(self):
            if not getattr(site, "_is_hf_initialized", False):
                _complete(site)
                site._is_hf_initialized = True  # type: ignore[assignment]
        super().initialize_weights()  # type: ignore[misc]


_classes: dict[type[Any], type[Any]] = {}


def wrapped_class(plain: type[Any]) -> Any:
    """The class of a wrapped model; it keeps the name of the model's own class, which other code looks up."""
    if issubclass(plain, Wrapped):
        return plain
    if plain in _classes:
        return _classes[plain]
    strict = {*(getattr(plain, "_keep_in_fp32_modules_strict", None) or ()), SITES}
    namespace = {"plain": plain, "_keep_in_fp32_modules_strict": strict, "__module__": plain.__module__}
    namespace |= {"__doc__": plain.__doc__, "__qualname__": plain.__qualname__}
    # transformers looks at the signature for the arguments of a model.
    namespace |= {"forward": plain.forward}
    return _classes.setdefault(plain, type(plain.__name__, (Wrapped, plain), namespace))


def _new(plain: type[Any]) -> Any:
    cls = wrapped_class(plain)
    return cls.__new__(cls)


def write_stub(folder: Path, name: str, *lines: str, package: str = "temper") -> None:
    """Writes a module into a model folder that imports the class an Auto class should use from this package."""
    distribution = "temper-hc" if package == "temper" else "temper-hc[lab]"
    text = f'''"""Makes the Auto classes of transformers (trust_remote_code=True) use the installed {package}."""

try:
    {lines[0]}
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "this model has hyper-connections and needs the library they come from: install {distribution} "
        f"{{version}} or newer first ({{missing}})"
    ) from missing
'''
    text = text.replace("{version}", importlib.import_module("temper").__version__)
    (folder / f"{name}.py").write_text("\n".join([text, *lines[1:]]).rstrip() + "\n", encoding="utf-8")


def _auto_classes(model: Any) -> list[str]:
    """The Auto classes that would build this model without its streams."""
    module = importlib.import_module("transformers.models.auto.modeling_auto")
    base = _transformers().AutoModel._model_mapping
    found = []
    for name in dir(module):
        mapping = getattr(getattr(module, name), "_model_mapping", None) if name.startswith("AutoModel") else None
        if mapping is None or type(model.config) not in mapping:
            continue
        known = mapping[type(model.config)]
        classes = known if isinstance(known, tuple | list) else (known,)
        # The bare model is part of a model with a head, and is wrapped as that is.
        if type(model).plain in classes or (mapping is base and len(classes) == 1):
            found.append(name)
    return found


def _entry(record: Any, configs: Sequence[RouterConfig]) -> dict[str, Any]:
    """One call of `wrap` as JSON holds it."""
    routers = [config.to_dict() for config in configs]
    return {
        "blocks": record.selector if record.selector is not None else list(record.blocks),
        "sites": record.sites,
        "reduce": record.reduce,
        "preset": record.preset,
        # Compressed models have different ranks at every site.
        "router": routers[0] if all(router == routers[0] for router in routers) else routers,
    }


def _repeat(model: nn.Module, entries: Any) -> None:
    """Wraps a model as its configuration says."""
    from temper.wrap import Record, _select, repeat

    for entry in [entries] if isinstance(entries, Mapping) else entries:
        if not isinstance(entry, Mapping) or set(entry) != set(FIELDS):
            found = sorted(entry) if isinstance(entry, Mapping) else entry
            raise ValueError(f"the entry {ENTRY!r} of config.json is {found}; expected {', '.join(FIELDS)}")
        names = entry["blocks"] if isinstance(entry["blocks"], list) else [entry["blocks"]]
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        if isinstance(model, nn.Module) and not hasattr(model, prefix[:-1]):
            # The bare model of one that was saved with a head.
            names = [name.removeprefix(prefix) for name in names]
        blocks = [name for name, _ in _select(model, names)]
        router = entry["router"]
        configs = [RouterConfig.from_dict(each) for each in (router if isinstance(router, list) else [router])]
        if not isinstance(router, list):
            configs *= entry["sites"] * len(blocks)
        selector = names[0] if isinstance(entry["blocks"], str) else None
        repeat(model, Record(tuple(blocks), selector, entry["sites"], entry["reduce"], entry["preset"]), configs)


@torch.no_grad()
def _complete(site: Router) -> None:
    """Initializes the tensors that were not loaded."""
    if site.config.is_residual:
        return
    # Moving a module rebuilds the constants that no file holds.
    site.mixer._apply(lambda tensor: tensor)
    missing = {
        name: parameter
        for name, parameter in site.state_dict(keep_vars=True).items()
        if not getattr(parameter, "_is_hf_initialized", False)
    }
    if missing and not any(parameter.is_meta for parameter in missing.values()):
        with torch.device("cpu"):
            fresh = Router(site.config, layer_index=site.layer_index).state_dict()
        for name, parameter in missing.items():
            parameter.data.copy_(fresh[name])


def _sites(model: nn.Module) -> list[Router]:
    return [site for site in model.modules() if isinstance(site, Router)]


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; expected a folder that save_pretrained has written")


def older_weights(folder: Any) -> dict[str, Any] | None:
    """All weights of a folder from an older version, whose gates are scalars; None for any other."""
    if folder is None or not os.path.isdir(folder):
        return None
    from safetensors import safe_open

    files = sorted(Path(folder).glob("*.safetensors"))
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                gates = [key for key in file.keys() if key.endswith(".gate")]  # noqa: SIM118
                if not any(file.get_slice(key).get_shape() == [] for key in gates):
                    continue
        # The actual loader reports a broken file in more detail.
        except Exception:
            return None
        from safetensors.torch import load_file

        return with_vector_gates({key: value for each in files for key, value in load_file(each).items()})
    return None


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as missing:
        if missing.name != "transformers":
            raise
        raise ModuleNotFoundError(
            "models of transformers need it installed: pip install transformers", name="transformers"
        ) from missing
