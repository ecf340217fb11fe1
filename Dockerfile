# One image for services and simulation; compose says what each container runs.
FROM python:3.11-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/venv
WORKDIR /src
# Dependencies first: they change rarely, so their layer is kept.
COPY requirements.lock pyproject.toml README.md LICENSE ./
COPY shared/sideband/__init__.py shared/sideband/__init__.py
RUN /opt/venv/bin/pip install --quiet -c requirements.lock ".[simulation]" \
    && /opt/venv/bin/pip uninstall --quiet --yes sideband
COPY shared shared
RUN /opt/venv/bin/pip install --quiet --no-deps .

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin sideband \
    # A named volume takes over the owner of the folder that it is first mounted on.
    && install -d -o sideband -g sideband /payloads /mnt/payloads /results /keys
COPY --from=build /opt/venv /opt/venv
WORKDIR /app
COPY services services
COPY simulation simulation
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER sideband
CMD ["python", "-m", "simulation.containers", "--help"]
