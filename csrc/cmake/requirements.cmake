# Finds what the build needs, or stops with one sentence that names the ways out. Sets
#   FLASHKDA_TORCH            folder of the installed torch package
#   FLASHKDA_CUTLASS_INCLUDE  CUTLASS's headers
#   FLASHKDA_NVCC, FLASHKDA_NVCC_VERSION
#   FLASHKDA_CUDA_INCLUDE, FLASHKDA_CUDART_STATIC, FLASHKDA_CUDART_VERSION

set(without_kernels "or build without kernels: -DFLASHKDA_CUDA=OFF \
(pip: --config-settings=cmake.define.FLASHKDA_CUDA=OFF)")

execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/find_packages.py
  OUTPUT_VARIABLE found COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "\n" ";" found "${found}")
list(GET found 0 FLASHKDA_TORCH)
list(GET found 1 FLASHKDA_CUTLASS_INCLUDE)
list(GET found 2 packaged_nvcc)

if(NOT FLASHKDA_TORCH)
  message(FATAL_ERROR "flashkda: ${Python_EXECUTABLE} has no torch, whose headers the build needs: \
pip install torch, ${without_kernels}")
endif()
file(STRINGS ${FLASHKDA_TORCH}/version.py line REGEX "^__version__ = ")
string(REGEX MATCH "[0-9]+\\.[0-9]+" torch_version "${line}")
if(torch_version VERSION_LESS 2.10)
  message(FATAL_ERROR "flashkda: ${Python_EXECUTABLE} has torch ${torch_version}, whose headers lack what the build \
needs: build with torch 2.10 or newer (what is built runs with 2.9 too), ${without_kernels}")
endif()
if(NOT FLASHKDA_CUTLASS_INCLUDE)
  message(FATAL_ERROR "flashkda: ${Python_EXECUTABLE} has no CUTLASS: pip install --no-deps \
nvidia-cutlass==4.2.0.0, ${without_kernels}")
endif()

# --- nvcc: the first that runs -------------------------------------------------------------------

find_program(nvcc_on_path nvcc PATHS ENV PATH NO_DEFAULT_PATH NO_CACHE)
set(FLASHKDA_NVCC)
foreach(candidate "$ENV{CUDACXX}" "$ENV{CUDA_HOME}/bin/nvcc" "${nvcc_on_path}" "${packaged_nvcc}")
  if(candidate)
    execute_process(COMMAND ${candidate} --version OUTPUT_VARIABLE version ERROR_QUIET
                    RESULT_VARIABLE status)
    # sm_103a came with 12.9.
    if(status EQUAL 0 AND version MATCHES ", V([0-9.]+)" AND NOT CMAKE_MATCH_1 VERSION_LESS 12.9)
      set(FLASHKDA_NVCC ${candidate})
      set(FLASHKDA_NVCC_VERSION ${CMAKE_MATCH_1})
      break()
    endif()
  endif()
endforeach()
if(NOT FLASHKDA_NVCC)
  message(FATAL_ERROR "flashkda: no nvcc of 12.9 or newer found through CUDACXX, CUDA_HOME, PATH or Python packages: \
set one of them, or pip install nvidia-cuda-nvcc==13.0.* nvidia-nvvm==13.0.* nvidia-cuda-crt==13.0.* \
nvidia-cuda-cccl==13.0.* nvidia-cuda-runtime==13.0.*, ${without_kernels}")
endif()

# --- its toolkit: where nvcc itself looks, since nvcc may be a wrapper -----------------------------

execute_process(COMMAND ${FLASHKDA_NVCC} -v --dryrun -x cu /dev/null
                OUTPUT_VARIABLE dryrun ERROR_VARIABLE dryrun)
string(REGEX MATCH "TOP=([^\n]+)" _ "${dryrun}")
set(toolkit ${CMAKE_MATCH_1})
string(REGEX MATCHALL "\"-[IL][^\"]+\"" nvcc_paths "${dryrun}")
list(TRANSFORM nvcc_paths REPLACE "^\"-[IL]|\"$" "")

find_path(FLASHKDA_CUDA_INCLUDE cuda_runtime_api.h PATHS ${nvcc_paths} ${toolkit}/include
          NO_DEFAULT_PATH)
find_library(FLASHKDA_CUDART_STATIC libcudart_static.a
             PATHS ${nvcc_paths} ${toolkit}/lib64 ${toolkit}/lib NO_DEFAULT_PATH)
if(NOT FLASHKDA_CUDA_INCLUDE OR NOT FLASHKDA_CUDART_STATIC)
  message(FATAL_ERROR "flashkda: the CUDA toolkit of ${FLASHKDA_NVCC} (${toolkit}) lacks \
cuda_runtime_api.h or libcudart_static.a: install its runtime (pip install nvidia-cuda-runtime==13.0.* \
beside a packaged nvcc), ${without_kernels}")
endif()
file(STRINGS ${FLASHKDA_CUDA_INCLUDE}/cuda_runtime_api.h line REGEX "^#define CUDART_VERSION")
string(REGEX MATCH "[0-9]+" number "${line}")
math(EXPR major "${number} / 1000")
math(EXPR minor "${number} % 1000 / 10")
set(FLASHKDA_CUDART_VERSION ${major}.${minor})
message(STATUS "flashkda: nvcc ${FLASHKDA_NVCC_VERSION} (${FLASHKDA_NVCC}), cudart \
${FLASHKDA_CUDART_VERSION} (${FLASHKDA_CUDART_STATIC}), torch in ${FLASHKDA_TORCH}")
