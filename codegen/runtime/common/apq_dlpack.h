/* The tensor type of the DLPack ABI (https://dmlc.github.io/dlpack/latest/c_api.html). An app that
 * uses dlpack.h itself includes it before this header. */
#if !defined(DLPACK_DLPACK_H_) && !defined(APQ_DLPACK_TYPES)
#define APQ_DLPACK_TYPES
typedef enum { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13 } DLDeviceType;
typedef enum { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBool = 6 } DLDataTypeCode;
typedef struct {
  int32_t device_type; /* kDLCPU, or kDLCUDA for memory of the GPU that the module runs on */
  int32_t device_id;   /* of a GPU: its number */
} DLDevice;
typedef struct {
  uint8_t code;   /* kDLInt, ... */
  uint8_t bits;   /* 8, 16, 32, 64 */
  uint16_t lanes; /* 1 */
} DLDataType;
typedef struct {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides; /* in elements; NULL means contiguous, last axis fastest */
  uint64_t byte_offset;
} DLTensor;
#endif
