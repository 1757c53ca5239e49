from pagemill.common.bounds import InvalidParameter as InvalidParameter
from pagemill.engine.errors import ConfigError as ConfigError
from pagemill.engine.errors import EngineError as EngineError
from pagemill.engine.errors import InvalidRequest as InvalidRequest
from pagemill.engine.errors import ModelLoadError as ModelLoadError
from pagemill.engine.llm import LLM as LLM
from pagemill.engine.sampling_params import BeamSearchParams as BeamSearchParams
from pagemill.engine.sampling_params import SamplingParams as SamplingParams
from pagemill.producer import *  # noqa: F403
