// A device for torch (PrivateUse1) whose faults are those of a GPU, on the CPU. See __init__.py.
//
// Memory: one memory file, mapped twice. Tensors point into the first mapping, which nobody may touch (PROT_NONE), so a
// host access crashes; kernels reach the same bytes through the second, at a constant distance.
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace {

constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr size_t DEVICES = 2, ARENA = size_t(1) << 30, GRAIN = 64;
constexpr int POISON = 0xAB;

thread_local c10::DeviceIndex current = 0;
thread_local bool in_kernel = false;  // the copies of the CPU fallback are not copies of the program

struct OnDevice {
  c10::DeviceIndex before = current;
  explicit OnDevice(std::optional<c10::Device> device) {
    if (device && device->has_index()) current = device->index();
  }
  ~OnDevice() { current = before; }
};

struct KernelScope {
  bool before = in_kernel;
  KernelScope() { in_kernel = true; }
  ~KernelScope() { in_kernel = before; }
};

// ---- memory -------------------------------------------------------------------------------------------------------

struct Arena {
  char *device, *host;
  std::mutex mutex;
  std::array<size_t, DEVICES> end{}, live{}, peak{}, limit{};
  std::multimap<std::pair<size_t, size_t>, char*> free;  // by device and size
  std::unordered_map<char*, size_t> sizes;
  std::set<int> used;  // devices on which any thread did anything
  std::map<std::string, int64_t> counts;

  Arena() {
    int file = memfd_create("simulated_device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, DEVICES * ARENA) == 0, "memfd_create failed");
    auto map = [&](int protection) {
      void* at = mmap(nullptr, DEVICES * ARENA, protection, MAP_SHARED, file, 0);
      TORCH_CHECK(at != MAP_FAILED, "mmap failed");
      return static_cast<char*>(at);
    };
    device = map(PROT_NONE), host = map(PROT_READ | PROT_WRITE);
    limit.fill(ARENA);
  }
  char* shadow(const void* at) { return host + (static_cast<const char*>(at) - device); }
  size_t index_of(const void* at) { return (static_cast<const char*>(at) - device) / ARENA; }

  char* take(size_t nbytes, size_t index) {
    std::lock_guard lock(mutex);
    used.insert(index);
    size_t size = (nbytes + GRAIN - 1) / GRAIN * GRAIN;
    TORCH_CHECK_WITH(
        OutOfMemoryError, live[index] + size <= limit[index], "sim:", index, " is out of memory: ", size, " bytes");
    char* at;
    if (auto found = free.find({index, size}); found != free.end()) {
      at = found->second;
      free.erase(found);
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, end[index] + size <= ARENA, "sim:", index, ": the arena is full");
      at = device + index * ARENA + end[index];
      end[index] += size;
    }
    sizes[at] = size;
    live[index] += size;
    peak[index] = std::max(peak[index], live[index]);
    return at;
  }
  void give_back(char* at) {
    std::lock_guard lock(mutex);
    size_t size = sizes.at(at), index = index_of(at);
    sizes.erase(at);
    live[index] -= size;
    memset(shadow(at), POISON, size);
    free.insert({{index, size}, at});
  }
  void count(const std::string& what, int64_t n = 1) {
    std::lock_guard lock(mutex);
    counts[what] += n;
  }
};

Arena& arena() {
  static Arena* one = new Arena;  // never destroyed: tensors may outlive everything
  return *one;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    char* at = nbytes ? arena().take(nbytes, current) : nullptr;
    return {at, at, &release, c10::Device(SIM, current)};
  }
  static void release(void* at) {
    if (at) arena().give_back(static_cast<char*>(at));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override {
    memcpy(arena().shadow(to), arena().shadow(from), n);
  }
};
DeviceAllocator device_allocator;

// Memory of the host that is pinned; in powers of two, as CUDA's allocator has it. On the current device of the thread.
struct PinnedAllocator final : c10::Allocator {
  static inline std::map<char*, size_t> blocks;
  static inline std::mutex mutex;
  c10::DataPtr allocate(size_t nbytes) override {
    size_t size = GRAIN;
    while (size < nbytes) size *= 2;
    auto* at = static_cast<char*>(aligned_alloc(4096, std::max<size_t>(size, 4096)));
    {
      std::lock_guard lock(arena().mutex);
      arena().used.insert(current);
      arena().counts["pinned_nbytes"] += size;
    }
    std::lock_guard lock(mutex);
    blocks[at] = size;
    return {at, at, &release, c10::Device(c10::DeviceType::CPU)};
  }
  static void release(void* at) {
    std::lock_guard lock(mutex);
    blocks.erase(static_cast<char*>(at));
    free(at);
  }
  static bool contains(const void* at) {
    std::lock_guard lock(mutex);
    auto after = blocks.upper_bound(const_cast<char*>(static_cast<const char*>(at)));
    return after != blocks.begin() && at < std::prev(after)->first + std::prev(after)->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
PinnedAllocator pinned_allocator;

// The same bytes as a tensor of the host, for kernels.
at::Tensor shadow_of(const at::Tensor& tensor) {
  auto options = tensor.options().device(c10::kCPU);
  const auto& storage = tensor.storage();
  if (!storage.data_ptr().get()) return at::empty(tensor.sizes(), options);
  auto flat = at::from_blob(
      arena().shadow(storage.data_ptr().get()), {int64_t(storage.nbytes() / tensor.element_size())}, options);
  return flat.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

// ---- what is under way --------------------------------------------------------------------------------------------

// One queue for all streams. A copy to the host is done when somebody waits for the device; until then the
// destination holds poison. The bytes are those of the time of the call, since kernels run in order.
struct Pending {
  at::Tensor to, captured;
};
std::mutex pending_mutex;
std::vector<Pending> pending;
std::vector<std::function<void()>> unfinished_collectives;

void finish_copies() {
  std::vector<Pending> now;
  {
    std::lock_guard lock(pending_mutex);
    now.swap(pending);
  }
  KernelScope scope;
  for (auto& copy : now) copy.to.copy_(copy.captured);
}

void poison(at::Tensor& host) {
  if (host.is_contiguous()) memset(host.data_ptr(), POISON, host.nbytes());
}

void finish_collectives();

void wait_for_device(const char* who) {
  arena().count(who);
  finish_collectives();
  finish_copies();
}

// ---- operators ----------------------------------------------------------------------------------------------------

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice scope(device);
  return at::detail::empty_generic(
      size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  OnDevice scope(device);
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

void resize_storage(const c10::Storage& storage, size_t nbytes) {
  OnDevice scope(storage.device());
  auto data = device_allocator.allocate(nbytes);
  if (auto kept = std::min<size_t>(nbytes, storage.nbytes()))
    device_allocator.copy_data(data.get(), storage.data_ptr().get(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  size_t nbytes = (c10::multiply_integers(size) + self.storage_offset()) * self.element_size();
  if (nbytes > self.storage().nbytes()) resize_storage(self.storage(), nbytes);
  impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  impl->set_storage_offset(offset);
  if (stride.data() && (stride.size() || size.empty()))
    impl->set_sizes_and_strides(size, stride);
  else
    impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  int64_t n = source.nbytes() / self.element_size();
  return set_storage(self, std::move(source), 0, {n}, {});
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (in_kernel || (self.device().type() == SIM && to.device().type() == SIM)) {
    KernelScope scope;
    auto host_to = to.device().type() == SIM ? shadow_of(to) : to;
    host_to.copy_(self.device().type() == SIM ? shadow_of(self) : self);
  } else if (to.device().type() == SIM) {
    arena().count("copies_to_device");
    KernelScope scope;
    shadow_of(to).copy_(self);
  } else {
    arena().count("copies_to_host");
    if (non_blocking && PinnedAllocator::contains(to.data_ptr())) {
      auto captured = at::empty_like(to);
      captured.copy_(shadow_of(self));
      auto destination = to;
      poison(destination);
      std::lock_guard lock(pending_mutex);
      pending.push_back({to, captured});
    } else {
      wait_for_device("blocking_copies");
      KernelScope scope;
      auto destination = to;
      destination.copy_(shadow_of(self));
    }
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  if (!in_kernel) wait_for_device("items");
  return at::cpu::_local_scalar_dense(shadow_of(self));
}

bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  auto is_dense = [](const at::Tensor& t) {
    return t.layout() == c10::kStrided && (t.is_cpu() || t.device().type() == SIM);
  };
  return is_dense(self) && is_dense(from);
}

void record_stream(at::Tensor&, at::Stream) {}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  KernelScope scope;
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// ---- the device for torch: one stream; the current device belongs to the thread ------------------------------------

c10::DeviceIndex exchange(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && size_t(index) < DEVICES, "no device sim:", int(index));
  return std::exchange(current, index);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SIM; }
  c10::Device exchangeDevice(c10::Device d) const override { return {SIM, exchange(d.index())}; }
  c10::Device getDevice() const override { return {SIM, current}; }
  void setDevice(c10::Device d) const override { exchange(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current = d.index(); }
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getStream(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait_for_device("synchronizations"); }
  void synchronizeEvent(void*) const override { wait_for_device("synchronizations"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_for_device("synchronizations"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    std::lock_guard lock(arena().mutex);
    return arena().used.count(index);
  }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchange(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return exchange(index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchange(index); }
  bool isPinnedPtr(const void* at) const override { return PinnedAllocator::contains(at); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void* at) const override { return {SIM, c10::DeviceIndex(arena().index_of(at))}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};

// ---- collectives: gloo's, on copies; a result arrives when it, or a later one of its group, is waited for -----------

struct Operation {
  c10::intrusive_ptr<c10d::Work> gloo;
  std::vector<std::pair<at::Tensor, at::Tensor>> results;  // on the device and on the host
  bool done = false;
};

struct Queue {  // of one group
  std::recursive_mutex mutex;
  std::vector<std::shared_ptr<Operation>> operations;
  // All up to `last`, or all.
  void finish(const Operation* last) {
    std::lock_guard lock(mutex);
    while (!operations.empty() && !(last && last->done)) {
      auto first = operations.front();
      operations.erase(operations.begin());
      first->gloo->wait();
      KernelScope scope;
      for (auto& [device, host] : first->results) shadow_of(device).copy_(host);
      first->done = true;
    }
  }
};
std::mutex queues_mutex;
std::vector<std::weak_ptr<Queue>> queues;

void finish_collectives() {
  std::vector<std::weak_ptr<Queue>> now;
  {
    std::lock_guard lock(queues_mutex);
    now = queues;
  }
  for (auto& one : now)
    if (auto queue = one.lock()) queue->finish(nullptr);
}

struct DeviceWork final : c10d::Work {
  std::shared_ptr<Queue> queue;
  std::shared_ptr<Operation> operation;
  std::vector<at::Tensor> outputs;
  DeviceWork(std::shared_ptr<Queue> q, std::shared_ptr<Operation> o, std::vector<at::Tensor> out, c10d::OpType type)
      : Work(-1, type), queue(std::move(q)), operation(std::move(o)), outputs(std::move(out)) {}
  bool isCompleted() override { return operation->done || operation->gloo->isCompleted(); }
  bool isSuccess() const override { return true; }
  void synchronize() override { queue->finish(operation.get()); }
  bool wait(std::chrono::milliseconds) override {
    queue->finish(operation.get());
    return true;
  }
  std::vector<at::Tensor> result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    queue->finish(operation.get());
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{{SIM, current}});
    future->markCompleted(c10::IValue(outputs));
    return future;
  }
};

using Tensors = std::vector<at::Tensor>;

struct DeviceBackend final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::shared_ptr<Queue> queue = std::make_shared<Queue>();

  explicit DeviceBackend(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)) {
    std::lock_guard lock(queues_mutex);
    queues.push_back(queue);
  }
  const std::string getBackendName() const override { return "simccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }

  // Host copies of one call's tensors.
  struct Call {
    std::shared_ptr<Operation> operation = std::make_shared<Operation>();
    Tensors outputs;
    at::Tensor in(const at::Tensor& device) {
      KernelScope scope;
      return shadow_of(device).contiguous().clone();
    }
    at::Tensor out(const at::Tensor& device, bool also_in = false) {
      auto host = in(device);
      if (!also_in) {
        KernelScope scope;
        auto shadow = shadow_of(device);
        poison(shadow);
      }
      operation->results.emplace_back(device, host);
      outputs.push_back(device);
      return host;
    }
    template <typename Tensor_s>  // or lists of them
    std::vector<Tensor_s> in(const std::vector<Tensor_s>& all) {
      std::vector<Tensor_s> hosts;
      for (auto& one : all) hosts.push_back(in(one));
      return hosts;
    }
    template <typename Tensor_s>
    std::vector<Tensor_s> out(const std::vector<Tensor_s>& all, bool also_in = false) {
      std::vector<Tensor_s> hosts;
      for (auto& one : all) hosts.push_back(out(one, also_in));
      return hosts;
    }
  };
  c10::intrusive_ptr<c10d::Work> start(Call& call, c10d::OpType type, c10::intrusive_ptr<c10d::Work> work) {
    arena().count("collectives");
    call.operation->gloo = std::move(work);
    std::lock_guard lock(queue->mutex);
    queue->operations.push_back(call.operation);
    return c10::make_intrusive<DeviceWork>(queue, call.operation, call.outputs, type);
  }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    Call call;
    auto hosts = call.out(tensors, o.rootRank == rank_);
    return start(call, c10d::OpType::BROADCAST, gloo->broadcast(hosts, o));
  }
  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    Call call;
    auto hosts = call.out(tensors, true);
    return start(call, c10d::OpType::ALLREDUCE, gloo->allreduce(hosts, o));
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    Call call;
    auto hosts = call.out(tensors, true);
    return start(call, c10d::OpType::ALLREDUCE_COALESCED, gloo->allreduce_coalesced(hosts, o));
  }
  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    Call call;
    auto hosts = call.out(tensors, true);
    return start(call, c10d::OpType::REDUCE, gloo->reduce(hosts, o));
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    Call call;
    auto ins = call.in(inputs);
    auto outs = call.out(outputs);
    return start(call, c10d::OpType::ALLGATHER, gloo->allgather(outs, ins, o));
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& o) override {
    Call call;
    auto in = call.in(input), out = call.out(output);
    return start(call, c10d::OpType::_ALLGATHER_BASE, gloo->_allgather_base(out, in, o));
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    Call call;
    auto ins = call.in(inputs), outs = call.out(outputs);
    return start(call, c10d::OpType::_ALLGATHER_BASE, gloo->allgather_into_tensor_coalesced(outs, ins, o));
  }
  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& o) override {
    Call call;
    auto ins = call.in(inputs);
    auto outs = call.out(outputs);
    return start(call, c10d::OpType::GATHER, gloo->gather(outs, ins, o));
  }
  c10::intrusive_ptr<c10d::Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& o) override {
    Call call;
    auto ins = call.in(inputs);
    auto outs = call.out(outputs);
    return start(call, c10d::OpType::SCATTER, gloo->scatter(outs, ins, o));
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& o) override {
    Call call;
    auto ins = call.in(inputs);
    auto outs = call.out(outputs);
    return start(call, c10d::OpType::REDUCE_SCATTER, gloo->reduce_scatter(outs, ins, o));
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& o) override {
    Call call;
    auto in = call.in(input), out = call.out(output);
    return start(call, c10d::OpType::_REDUCE_SCATTER_BASE, gloo->_reduce_scatter_base(out, in, o));
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& o) override {
    Call call;
    auto in = call.in(input), out = call.out(output);
    return start(
        call, c10d::OpType::ALLTOALL_BASE, gloo->alltoall_base(out, in, output_splits, input_splits, o));
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& o) override {
    Call call;
    return start(call, c10d::OpType::BARRIER, gloo->barrier(c10d::BarrierOptions{{}, o.timeout, std::nullopt}));
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(SIM, &device_allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  using Released = py::call_guard<py::gil_scoped_release>;
  m.def("device_count", [] { return DEVICES; });
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int index) { exchange(index); });
  m.def("synchronize", [] { wait_for_device("synchronizations"); }, Released());
  m.def("memory", [](size_t index) {
    std::lock_guard lock(arena().mutex);
    return std::make_pair(arena().live.at(index), arena().peak.at(index));
  });
  m.def("reset_peak", [](size_t index) {
    std::lock_guard lock(arena().mutex);
    arena().peak.at(index) = arena().live.at(index);
  });
  m.def("set_limit", [](size_t index, std::optional<size_t> nbytes) {
    std::lock_guard lock(arena().mutex);
    arena().limit.at(index) = nbytes.value_or(ARENA);
  });
  m.def("counts", [] {
    std::lock_guard lock(arena().mutex);
    return arena().counts;
  });
  m.def("used_devices", [] {
    std::lock_guard lock(arena().mutex);
    return arena().used;
  });
  py::class_<DeviceBackend, c10::intrusive_ptr<DeviceBackend>, c10d::Backend>(m, "Backend")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> gloo) {
        return c10::make_intrusive<DeviceBackend>(std::move(gloo));
      }));
}
