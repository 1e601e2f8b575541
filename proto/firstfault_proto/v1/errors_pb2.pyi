from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Writer(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WRITER_UNSPECIFIED: _ClassVar[Writer]
    WRITER_WORKER: _ClassVar[Writer]
    WRITER_AGENT: _ClassVar[Writer]
    WRITER_RECORDER: _ClassVar[Writer]

class Subject(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SUBJECT_UNSPECIFIED: _ClassVar[Subject]
    SUBJECT_WORKER: _ClassVar[Subject]
    SUBJECT_AGENT: _ClassVar[Subject]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_JOINED: _ClassVar[Phase]
    PHASE_FAILED: _ClassVar[Phase]
    PHASE_SUCCEEDED: _ClassVar[Phase]
WRITER_UNSPECIFIED: Writer
WRITER_WORKER: Writer
WRITER_AGENT: Writer
WRITER_RECORDER: Writer
SUBJECT_UNSPECIFIED: Subject
SUBJECT_WORKER: Subject
SUBJECT_AGENT: Subject
PHASE_UNSPECIFIED: Phase
PHASE_JOINED: Phase
PHASE_FAILED: Phase
PHASE_SUCCEEDED: Phase

class WorkerErrorDocument(_message.Message):
    __slots__ = ("error", "failure", "verdict")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    error: ContainerError
    failure: WorkerFailure
    verdict: SealedVerdict
    def __init__(self, error: _Optional[_Union[ContainerError, _Mapping]] = ..., failure: _Optional[_Union[WorkerFailure, _Mapping]] = ..., verdict: _Optional[_Union[SealedVerdict, _Mapping]] = ...) -> None: ...

class ContainerError(_message.Message):
    __slots__ = ("code", "message", "kind", "origin", "timestamp", "worker")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NON_RECOVERABLE: _ClassVar[ContainerError.Kind]
        RECOVERABLE: _ClassVar[ContainerError.Kind]
    NON_RECOVERABLE: ContainerError.Kind
    RECOVERABLE: ContainerError.Kind
    class Origin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[ContainerError.Origin]
        USER: _ClassVar[ContainerError.Origin]
        SYSTEM: _ClassVar[ContainerError.Origin]
    UNKNOWN: ContainerError.Origin
    USER: ContainerError.Origin
    SYSTEM: ContainerError.Origin
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    kind: ContainerError.Kind
    origin: ContainerError.Origin
    timestamp: _timestamp_pb2.Timestamp
    worker: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., kind: _Optional[_Union[ContainerError.Kind, str]] = ..., origin: _Optional[_Union[ContainerError.Origin, str]] = ..., timestamp: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., worker: _Optional[str] = ...) -> None: ...

class WorkerFailure(_message.Message):
    __slots__ = ("schema_version", "writer", "subject", "place", "wall_time_ns", "monotonic_ns", "boot_id", "upload_delay_ns", "exception", "exit_code", "signal", "sent_signals", "in_flight", "category", "fingerprint", "log_tail", "stack_dumps", "resources", "versions", "thread_failures", "collectives", "caused_by", "expired", "system", "handled_exceptions")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    MONOTONIC_NS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_DELAY_NS_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    SENT_SIGNALS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    CATEGORY_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LOG_TAIL_FIELD_NUMBER: _ClassVar[int]
    STACK_DUMPS_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    THREAD_FAILURES_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_FIELD_NUMBER: _ClassVar[int]
    CAUSED_BY_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    HANDLED_EXCEPTIONS_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    writer: Writer
    subject: Subject
    place: Place
    wall_time_ns: int
    monotonic_ns: int
    boot_id: str
    upload_delay_ns: int
    exception: ExceptionRecord
    exit_code: int
    signal: str
    sent_signals: _containers.RepeatedCompositeFieldContainer[SentSignal]
    in_flight: bool
    category: str
    fingerprint: str
    log_tail: str
    stack_dumps: _containers.RepeatedCompositeFieldContainer[StackDump]
    resources: ResourceEvidence
    versions: _containers.ScalarMap[str, str]
    thread_failures: _containers.RepeatedCompositeFieldContainer[ThreadFailure]
    collectives: _containers.RepeatedCompositeFieldContainer[CollectiveProgress]
    caused_by: CausedBy
    expired: ExpiredDeadline
    system: SystemState
    handled_exceptions: _containers.RepeatedCompositeFieldContainer[HandledException]
    def __init__(self, schema_version: _Optional[int] = ..., writer: _Optional[_Union[Writer, str]] = ..., subject: _Optional[_Union[Subject, str]] = ..., place: _Optional[_Union[Place, _Mapping]] = ..., wall_time_ns: _Optional[int] = ..., monotonic_ns: _Optional[int] = ..., boot_id: _Optional[str] = ..., upload_delay_ns: _Optional[int] = ..., exception: _Optional[_Union[ExceptionRecord, _Mapping]] = ..., exit_code: _Optional[int] = ..., signal: _Optional[str] = ..., sent_signals: _Optional[_Iterable[_Union[SentSignal, _Mapping]]] = ..., in_flight: bool = ..., category: _Optional[str] = ..., fingerprint: _Optional[str] = ..., log_tail: _Optional[str] = ..., stack_dumps: _Optional[_Iterable[_Union[StackDump, _Mapping]]] = ..., resources: _Optional[_Union[ResourceEvidence, _Mapping]] = ..., versions: _Optional[_Mapping[str, str]] = ..., thread_failures: _Optional[_Iterable[_Union[ThreadFailure, _Mapping]]] = ..., collectives: _Optional[_Iterable[_Union[CollectiveProgress, _Mapping]]] = ..., caused_by: _Optional[_Union[CausedBy, _Mapping]] = ..., expired: _Optional[_Union[ExpiredDeadline, _Mapping]] = ..., system: _Optional[_Union[SystemState, _Mapping]] = ..., handled_exceptions: _Optional[_Iterable[_Union[HandledException, _Mapping]]] = ...) -> None: ...

class SystemState(_message.Message):
    __slots__ = ("file_systems", "limits", "open_files")
    FILE_SYSTEMS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    file_systems: _containers.RepeatedCompositeFieldContainer[FileSystem]
    limits: _containers.RepeatedCompositeFieldContainer[ResourceLimit]
    open_files: int
    def __init__(self, file_systems: _Optional[_Iterable[_Union[FileSystem, _Mapping]]] = ..., limits: _Optional[_Iterable[_Union[ResourceLimit, _Mapping]]] = ..., open_files: _Optional[int] = ...) -> None: ...

class ResourceLimit(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class FileSystem(_message.Message):
    __slots__ = ("path", "free_bytes", "total_bytes", "free_inodes", "total_inodes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_INODES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_INODES_FIELD_NUMBER: _ClassVar[int]
    path: str
    free_bytes: int
    total_bytes: int
    free_inodes: int
    total_inodes: int
    def __init__(self, path: _Optional[str] = ..., free_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., free_inodes: _Optional[int] = ..., total_inodes: _Optional[int] = ...) -> None: ...

class ExpiredDeadline(_message.Message):
    __slots__ = ("scope", "seconds", "heartbeat", "since")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    scope: str
    seconds: float
    heartbeat: bool
    since: str
    def __init__(self, scope: _Optional[str] = ..., seconds: _Optional[float] = ..., heartbeat: bool = ..., since: _Optional[str] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("attempt", "round", "incarnation", "restart_count", "global_rank", "local_rank", "group_rank", "world_size", "group_world_size", "role", "node", "host", "ip", "pid", "namespace", "engine", "machine", "gpu")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RESTART_COUNT_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUP_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    IP_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    round: int
    incarnation: int
    restart_count: int
    global_rank: int
    local_rank: int
    group_rank: int
    world_size: int
    group_world_size: int
    role: str
    node: str
    host: str
    ip: str
    pid: int
    namespace: str
    engine: str
    machine: str
    gpu: str
    def __init__(self, attempt: _Optional[int] = ..., round: _Optional[int] = ..., incarnation: _Optional[int] = ..., restart_count: _Optional[int] = ..., global_rank: _Optional[int] = ..., local_rank: _Optional[int] = ..., group_rank: _Optional[int] = ..., world_size: _Optional[int] = ..., group_world_size: _Optional[int] = ..., role: _Optional[str] = ..., node: _Optional[str] = ..., host: _Optional[str] = ..., ip: _Optional[str] = ..., pid: _Optional[int] = ..., namespace: _Optional[str] = ..., engine: _Optional[str] = ..., machine: _Optional[str] = ..., gpu: _Optional[str] = ...) -> None: ...

class ExceptionRecord(_message.Message):
    __slots__ = ("type", "bases", "message", "frames", "notes", "causes", "relation", "frames_omitted", "members", "text_frames")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    RELATION_FIELD_NUMBER: _ClassVar[int]
    FRAMES_OMITTED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FRAMES_FIELD_NUMBER: _ClassVar[int]
    type: str
    bases: _containers.RepeatedScalarFieldContainer[str]
    message: str
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    notes: _containers.RepeatedScalarFieldContainer[str]
    causes: _containers.RepeatedCompositeFieldContainer[ExceptionRecord]
    relation: str
    frames_omitted: int
    members: _containers.RepeatedCompositeFieldContainer[ExceptionRecord]
    text_frames: _containers.RepeatedCompositeFieldContainer[Frame]
    def __init__(self, type: _Optional[str] = ..., bases: _Optional[_Iterable[str]] = ..., message: _Optional[str] = ..., frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ..., causes: _Optional[_Iterable[_Union[ExceptionRecord, _Mapping]]] = ..., relation: _Optional[str] = ..., frames_omitted: _Optional[int] = ..., members: _Optional[_Iterable[_Union[ExceptionRecord, _Mapping]]] = ..., text_frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("file", "line", "function", "code", "context", "context_line", "marked_from", "marked_to")
    FILE_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LINE_FIELD_NUMBER: _ClassVar[int]
    MARKED_FROM_FIELD_NUMBER: _ClassVar[int]
    MARKED_TO_FIELD_NUMBER: _ClassVar[int]
    file: str
    line: int
    function: str
    code: str
    context: _containers.RepeatedScalarFieldContainer[str]
    context_line: int
    marked_from: int
    marked_to: int
    def __init__(self, file: _Optional[str] = ..., line: _Optional[int] = ..., function: _Optional[str] = ..., code: _Optional[str] = ..., context: _Optional[_Iterable[str]] = ..., context_line: _Optional[int] = ..., marked_from: _Optional[int] = ..., marked_to: _Optional[int] = ...) -> None: ...

class SentSignal(_message.Message):
    __slots__ = ("signal", "reason")
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    signal: str
    reason: str
    def __init__(self, signal: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class StackDump(_message.Message):
    __slots__ = ("pid", "global_rank", "text")
    PID_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_RANK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    pid: int
    global_rank: int
    text: str
    def __init__(self, pid: _Optional[int] = ..., global_rank: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class ThreadFailure(_message.Message):
    __slots__ = ("thread", "wall_time_ns", "exception")
    THREAD_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    thread: str
    wall_time_ns: int
    exception: ExceptionRecord
    def __init__(self, thread: _Optional[str] = ..., wall_time_ns: _Optional[int] = ..., exception: _Optional[_Union[ExceptionRecord, _Mapping]] = ...) -> None: ...

class HandledException(_message.Message):
    __slots__ = ("wall_time_ns", "exception", "times", "calls_since")
    WALL_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    CALLS_SINCE_FIELD_NUMBER: _ClassVar[int]
    wall_time_ns: int
    exception: ExceptionRecord
    times: int
    calls_since: int
    def __init__(self, wall_time_ns: _Optional[int] = ..., exception: _Optional[_Union[ExceptionRecord, _Mapping]] = ..., times: _Optional[int] = ..., calls_since: _Optional[int] = ...) -> None: ...

class CollectiveProgress(_message.Message):
    __slots__ = ("group", "last_operation", "enqueued", "completed", "last", "members")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LAST_OPERATION_FIELD_NUMBER: _ClassVar[int]
    ENQUEUED_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    group: str
    last_operation: str
    enqueued: int
    completed: int
    last: _containers.RepeatedCompositeFieldContainer[Collective]
    members: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[str] = ..., last_operation: _Optional[str] = ..., enqueued: _Optional[int] = ..., completed: _Optional[int] = ..., last: _Optional[_Iterable[_Union[Collective, _Mapping]]] = ..., members: _Optional[_Iterable[int]] = ...) -> None: ...

class Collective(_message.Message):
    __slots__ = ("sequence", "operation", "sizes", "dtypes", "state", "is_p2p")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    IS_P2P_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    operation: str
    sizes: str
    dtypes: str
    state: str
    is_p2p: bool
    def __init__(self, sequence: _Optional[int] = ..., operation: _Optional[str] = ..., sizes: _Optional[str] = ..., dtypes: _Optional[str] = ..., state: _Optional[str] = ..., is_p2p: bool = ...) -> None: ...

class CausedBy(_message.Message):
    __slots__ = ("global_rank", "node", "document")
    GLOBAL_RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    global_rank: int
    node: str
    document: str
    def __init__(self, global_rank: _Optional[int] = ..., node: _Optional[str] = ..., document: _Optional[str] = ...) -> None: ...

class ResourceEvidence(_message.Message):
    __slots__ = ("oom_kill", "memory_peak_bytes", "memory_limit_bytes", "memory_used_bytes", "watermark_wall_ns")
    OOM_KILL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_WALL_NS_FIELD_NUMBER: _ClassVar[int]
    oom_kill: int
    memory_peak_bytes: int
    memory_limit_bytes: int
    memory_used_bytes: int
    watermark_wall_ns: int
    def __init__(self, oom_kill: _Optional[int] = ..., memory_peak_bytes: _Optional[int] = ..., memory_limit_bytes: _Optional[int] = ..., memory_used_bytes: _Optional[int] = ..., watermark_wall_ns: _Optional[int] = ...) -> None: ...

class RosterEntry(_message.Message):
    __slots__ = ("schema_version", "phase", "place", "workers", "wall_time_ns", "receipts", "first_failure", "first_failure_reason", "log_tails", "setup", "progress", "finished_ranks")
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FAILURE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FAILURE_REASON_FIELD_NUMBER: _ClassVar[int]
    LOG_TAILS_FIELD_NUMBER: _ClassVar[int]
    SETUP_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_RANKS_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    phase: Phase
    place: Place
    workers: _containers.RepeatedCompositeFieldContainer[RosterWorker]
    wall_time_ns: int
    receipts: _containers.RepeatedCompositeFieldContainer[DocumentReceipt]
    first_failure: CausedBy
    first_failure_reason: str
    log_tails: _containers.RepeatedCompositeFieldContainer[LogTail]
    setup: NodeSetup
    progress: TrainingProgress
    finished_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, schema_version: _Optional[int] = ..., phase: _Optional[_Union[Phase, str]] = ..., place: _Optional[_Union[Place, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[RosterWorker, _Mapping]]] = ..., wall_time_ns: _Optional[int] = ..., receipts: _Optional[_Iterable[_Union[DocumentReceipt, _Mapping]]] = ..., first_failure: _Optional[_Union[CausedBy, _Mapping]] = ..., first_failure_reason: _Optional[str] = ..., log_tails: _Optional[_Iterable[_Union[LogTail, _Mapping]]] = ..., setup: _Optional[_Union[NodeSetup, _Mapping]] = ..., progress: _Optional[_Union[TrainingProgress, _Mapping]] = ..., finished_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class TrainingProgress(_message.Message):
    __slots__ = ("collectives", "seconds", "idle_seconds")
    COLLECTIVES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    collectives: int
    seconds: float
    idle_seconds: float
    def __init__(self, collectives: _Optional[int] = ..., seconds: _Optional[float] = ..., idle_seconds: _Optional[float] = ...) -> None: ...

class LogTail(_message.Message):
    __slots__ = ("global_rank", "text")
    GLOBAL_RANK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    global_rank: int
    text: str
    def __init__(self, global_rank: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class NodeSetup(_message.Message):
    __slots__ = ("task", "image", "gpu_model", "gpus", "source_url", "source_root")
    TASK_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    GPU_MODEL_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_URL_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ROOT_FIELD_NUMBER: _ClassVar[int]
    task: str
    image: str
    gpu_model: str
    gpus: int
    source_url: str
    source_root: str
    def __init__(self, task: _Optional[str] = ..., image: _Optional[str] = ..., gpu_model: _Optional[str] = ..., gpus: _Optional[int] = ..., source_url: _Optional[str] = ..., source_root: _Optional[str] = ...) -> None: ...

class RosterWorker(_message.Message):
    __slots__ = ("global_rank", "local_rank", "pid")
    GLOBAL_RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    global_rank: int
    local_rank: int
    pid: int
    def __init__(self, global_rank: _Optional[int] = ..., local_rank: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class DocumentReceipt(_message.Message):
    __slots__ = ("key", "durable", "fault_to_durable_ns", "error", "global_rank", "withdrawn")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    FAULT_TO_DURABLE_NS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_RANK_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    key: str
    durable: bool
    fault_to_durable_ns: int
    error: str
    global_rank: int
    withdrawn: bool
    def __init__(self, key: _Optional[str] = ..., durable: bool = ..., fault_to_durable_ns: _Optional[int] = ..., error: _Optional[str] = ..., global_rank: _Optional[int] = ..., withdrawn: bool = ...) -> None: ...

class SealedVerdict(_message.Message):
    __slots__ = ("schema_version", "wall_time_ns", "digest", "document_count", "strategy", "json", "node")
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    wall_time_ns: int
    digest: str
    document_count: int
    strategy: str
    json: str
    node: str
    def __init__(self, schema_version: _Optional[int] = ..., wall_time_ns: _Optional[int] = ..., digest: _Optional[str] = ..., document_count: _Optional[int] = ..., strategy: _Optional[str] = ..., json: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...
