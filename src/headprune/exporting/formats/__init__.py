"""Formats: how a model is written for an engine. One file each; a new one is a row here."""

from headprune.errors import PlanError
from headprune.exporting.formats.gguf import gguf
from headprune.exporting.formats.onnx import onnx
from headprune.exporting.formats.openvino import openvino
from headprune.exporting.formats.spec import Format
from headprune.exporting.formats.vllm import vllm
from headprune.exporting.source import ExportSource
from headprune.registry import Registry

__all__ = ["FORMATS", "ExportSource", "Format"]

FORMATS: Registry[Format] = Registry("format", PlanError)
FORMATS.add("gguf", gguf)
FORMATS.add("vllm", vllm)
FORMATS.add("onnx", onnx)
FORMATS.add("openvino", openvino)
FORMATS.freeze()
