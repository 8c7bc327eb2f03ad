// Storages that are empty for a while (accel/memory/recompute.py), on any device.
//
// Tensors hold a storage, not its memory: emptied, it frees the memory at once, and whoever reads one of its
// tensors gets an error; filled, all of them have data again. Nothing is copied: the storage then holds the
// memory of another, which stays alive as long as one of the two does.

#include <string>

#include <ATen/core/Tensor.h>
#include <torch/library.h>
#include <torch/version.h>

#include "accel/check.h"

namespace accel {
namespace {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
// Before 2.13 a storage could be told that its data must not be read, but not that it may be again. The flag
// is private; an explicit instantiation may name it all the same.
bool& refuses_reads(c10::StorageImpl& storage);

template <bool c10::StorageImpl::*flag>
struct Named {
  friend bool& refuses_reads(c10::StorageImpl& storage) { return storage.*flag; }
};
template struct Named<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

void allow_reads(c10::StorageImpl& storage) { refuses_reads(storage) = false; }
#else
void allow_reads(c10::StorageImpl& storage) { storage.clear_data_ptr_access_error_msg_(); }
#endif

c10::StorageImpl& storage_of(const at::Tensor& x) {
  ACCEL_CHECK_VALUE(x.has_storage(), "emptied_storage: a tensor without a storage");
  return *x.storage().unsafeGetStorageImpl();
}

void empty(const at::Tensor& x, std::string message) {
  c10::StorageImpl& storage = storage_of(x);
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
  storage.set_nbytes(0);
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
}

void release(void* storage) { delete static_cast<c10::Storage*>(storage); }

void fill(const at::Tensor& x, const at::Tensor& source) {
  c10::StorageImpl& storage = storage_of(x);
  c10::StorageImpl& from = storage_of(source);
  ACCEL_CHECK_VALUE(&storage != &from && storage.nbytes() == 0,
                    "emptied_storage: only an empty storage can be filled, by another one");
  void* data = from.mutable_data();
  allow_reads(storage);
  storage.set_data_ptr_noswap(
      c10::DataPtr(data, new c10::Storage(source.storage()), &release, from.device()));
  storage.set_nbytes(from.nbytes());
}

TORCH_LIBRARY_FRAGMENT(accel, m) {
  m.def("_storage_empty(Tensor x, str message) -> ()", &empty);
  m.def("_storage_fill(Tensor x, Tensor source) -> ()", &fill);
}

}  // namespace
}  // namespace accel
