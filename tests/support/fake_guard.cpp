// A CPU build of torch has no device guard for CUDA, which indexing, .to() and copy_() ask for even with fake tensors.
#include <c10/core/impl/DeviceGuardImplInterface.h>

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);
