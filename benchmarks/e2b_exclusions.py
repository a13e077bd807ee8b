"""Tests of the SDK's suite that are not run against our service, by pattern and with the reason.

Allowed reasons: it needs the internet, a cloud account of E2B's or a template registry; or the suite, older than the
SDK it runs with, looks into what that SDK changed (no service is involved then). ``SUDO`` and the second half of
``TRANSFORM`` are deviations of ours.
"""

from __future__ import annotations

RUN = ""
INTERNET = "Needs the internet"
TRANSFORM = "Needs E2B's own template `httpbin`, and a proxy that rewrites outgoing HTTPS: unsupported, refused by name"
OLDER = "The suite is older than this SDK and looks into insides that it changed; no service is involved"
SUDO = 'Needs sudo, a set-user-id program: sandboxes gain no privileges (`user="root"` does what it is for)'

EXCLUDED: tuple[tuple[str, str, str], ...] = (
    ("*/test_internet_access.py::test_internet_access_default", "", INTERNET),
    ("*/test_internet_access.py::test_internet_access_enabled", "", INTERNET),
    ("*/test_network.py::test_allow_specific_ip_with_deny_all", "", INTERNET),
    ("*/test_network.py::test_allow_takes_precedence_over_deny", "", INTERNET),
    ("*/test_network.py::test_deny_specific_ip", "", INTERNET),
    ("*/test_network.py::test_update_network_applies_restrictions", "", INTERNET),
    ("*/test_network.py::test_update_network_clears_existing_rules", "", INTERNET),
    ("*/test_network.py::test_firewall_transform_injects_headers", "", TRANSFORM),
    ("*/test_env_vars.py::test_bash_command_scoped_env_vars", "", SUDO),
    ("*/test_connect.py::test_connect_normalizes_unset_tokens", "2.63", OLDER),
    ("*/test_stacktrace.py::test_traces_on_*absolute_path", "2.63", RUN),
    ("*/test_stacktrace.py::test_traces_on_add_mcp_server", "2.63", RUN),
    ("*/test_stacktrace.py::test_traces_on_from_image_credentials", "2.63", RUN),
    ("*/test_stacktrace.py::test_traces_on_*", "2.63", OLDER),
    ("tests/shared/sandbox/test_lifecycle_request.py::test_*create_sends_*", "2.63", OLDER),
    ("tests/shared/sandbox/test_lifecycle_request.py::test_create_omits_auto_pause_memory*", "2.63", OLDER),
    ("*::test_should_handle_complex_ignore_patterns_with_directories", "2.63", OLDER),
    ("*::test_should_handle_nested_ignore_patterns", "2.63", OLDER),
    ("tests/test_client.py::test_*client_sandbox_uses_client_config", "2.63", OLDER),
    ("tests/test_client.py::test_client_class_can_be_rebound", "2.63", OLDER),
    ("tests/test_client.py::test_client_params_are_copied", "2.63", OLDER),
    ("tests/test_client.py::test_client_sandbox_is_a_subclass", "2.63", OLDER),
    ("tests/test_client.py::test_per_call_params_*", "2.63", OLDER),
    ("tests/test_client.py::test_top_level_classes_keep_using_the_env_config", "2.63", OLDER),
    ("tests/test_client.py::test_two_clients_stay_isolated", "2.63", OLDER),
    ("tests/test_connection_config.py::test_validate_api_key_*", "2.63", OLDER),
    ("tests/test_envd_rpc_exception.py::*health_check_failure_returns_raw_error", "2.63", OLDER),
    ("tests/test_api_client_transport.py*", "2.63", OLDER),
    ("tests/test_validate_api_key.py*", "2.63", OLDER),
)
"""Pattern of test ids, start of the SDK versions it holds for ("" = all), reason."""
