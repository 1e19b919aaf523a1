# SPDX-License-Identifier: Apache-2.0
# Finds an installed Paddle wheel without importing it (an import takes seconds and needs a working runtime).
# Needs Python_EXECUTABLE, the interpreter that has it, or Paddle_ROOT, the wheel's `paddle` folder.
#
# Defines PaddlePaddle_VERSION, PaddlePaddle_VERSION_MAJOR, PaddlePaddle_WITH_CUDA and the target PaddlePaddle::PaddlePaddle.
if(NOT Paddle_ROOT)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
      "import importlib.util as u; s = u.find_spec('paddle'); print(list(s.submodule_search_locations)[0] if s else '')"
    OUTPUT_VARIABLE Paddle_ROOT
    OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
if(NOT EXISTS "${Paddle_ROOT}/include/paddle/extension.h")
  message(FATAL_ERROR
    "paddle_fm3: Python_EXECUTABLE=${Python_EXECUTABLE} has no paddle with headers (Paddle_ROOT='${Paddle_ROOT}'). "
    "Install paddlepaddle==3.3.1 there, or configure with -DFM3_PADDLE_OP=OFF for the kernels alone.")
endif()

file(STRINGS "${Paddle_ROOT}/version/__init__.py" paddle_version_lines REGEX "^(full_version|cuda_version) ")
string(REGEX MATCH "full_version +[=] +'([^']+)'" _ "${paddle_version_lines}")
set(PaddlePaddle_VERSION "${CMAKE_MATCH_1}")
string(REGEX MATCH "^[0-9]+" PaddlePaddle_VERSION_MAJOR "${PaddlePaddle_VERSION}")
string(REGEX MATCH "cuda_version +[=] +'([^']+)'" _ "${paddle_version_lines}")
if(CMAKE_MATCH_1 AND NOT CMAKE_MATCH_1 STREQUAL "False")
  set(PaddlePaddle_WITH_CUDA ON)
else()
  set(PaddlePaddle_WITH_CUDA OFF)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(PaddlePaddle
  REQUIRED_VARS Paddle_ROOT PaddlePaddle_VERSION_MAJOR VERSION_VAR PaddlePaddle_VERSION)

if(NOT TARGET PaddlePaddle::PaddlePaddle)
  add_library(PaddlePaddle::PaddlePaddle INTERFACE IMPORTED)
  target_include_directories(PaddlePaddle::PaddlePaddle SYSTEM INTERFACE
    ${Paddle_ROOT}/include ${Paddle_ROOT}/include/third_party)
  # PADDLE_NO_PYTHON: the op is registered through its meta information, not as a Python extension module.
  target_compile_definitions(PaddlePaddle::PaddlePaddle INTERFACE PADDLE_WITH_CUSTOM_KERNEL PADDLE_NO_PYTHON)
  if(PaddlePaddle_WITH_CUDA)
    target_compile_definitions(PaddlePaddle::PaddlePaddle INTERFACE PADDLE_WITH_CUDA)
  endif()
  file(GLOB paddle_libraries
    "${Paddle_ROOT}/base/libpaddle.so" "${Paddle_ROOT}/libs/libphi.so" "${Paddle_ROOT}/libs/libphi_core.so"
    "${Paddle_ROOT}/libs/libcommon.so")
  target_link_libraries(PaddlePaddle::PaddlePaddle INTERFACE ${paddle_libraries})
endif()
